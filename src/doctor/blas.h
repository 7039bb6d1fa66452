// Which library multiplies matrices for a LibTorch that brings none of its own (Debian's).
#pragma once

#include <string>

#include "doctor/finding.h"

namespace maniple::doctor {

struct BlasFacts {
  std::string path;  ///< where libblas.so.3 leads to; empty: it is not there
};

Findings judge(const BlasFacts& facts);
BlasFacts look_at_blas();

}  // namespace maniple::doctor
