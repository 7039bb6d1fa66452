// The checks of `maniple doctor`. A new one is a file with three things (the facts, a pure function that judges them,
// a look at this machine that gathers them) and one line in the table.
#pragma once

#include <span>

#include "doctor/finding.h"

namespace maniple::doctor {

struct Check {
  const char* name;
  Findings (*run)();
};
std::span<const Check> checks() noexcept;

}  // namespace maniple::doctor
