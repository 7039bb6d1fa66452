// Clocks. Deadlines use the monotonic one only; a wrong date spoils logs and certificates, not training.
#pragma once

#include <cstdint>
#include <string>

#include "doctor/finding.h"

namespace maniple::doctor {

struct ClockFacts {
  std::int64_t now = 0;       ///< seconds after 1970
  bool synchronised = false;  ///< the kernel thinks so
  std::string source = {};    ///< "tsc"; empty: not known
  double read_ns = 0;         ///< time that reading the monotonic clock takes
  bool goes_forward = true;
};

Findings judge(const ClockFacts& facts);
ClockFacts look_at_clock();

}  // namespace maniple::doctor
