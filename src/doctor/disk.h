// Room for temporary files.
#pragma once

#include <cstdint>
#include <string>

#include "doctor/finding.h"

namespace maniple::doctor {

struct DiskFacts {
  std::string path;          ///< TMPDIR or /tmp
  std::string problem = {};  ///< why nothing can be written there
  std::uint64_t free_bytes = 0;
};

Findings judge(const DiskFacts& facts);
DiskFacts look_at_disk();

}  // namespace maniple::doctor
