// Checks of what the kernel does for a job: shared memory and clocks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "doctor/checks.h"

namespace maniple::doctor {

// --- Memory that ranks of one host share, and the way it is handed over.

struct SharingFacts {
  std::string memfd_problem = {};  ///< making, mapping and writing shared memory; empty: it works
  std::string pass_problem = {};   ///< a descriptor over a Unix socket (SCM_RIGHTS)
  std::optional<std::uint64_t> dev_shm_bytes = std::nullopt;  ///< free in /dev/shm
};

Findings judge(const SharingFacts& facts);
SharingFacts inspect_sharing();

// --- Clocks. Deadlines use the monotonic one only; a wrong date spoils logs and certificates, not training.

struct ClockFacts {
  std::int64_t now = 0;       ///< seconds after 1970
  bool synchronised = false;  ///< the kernel thinks so
  std::string source = {};    ///< "tsc"; empty: not known
  double read_ns = 0;         ///< time that reading the monotonic clock takes
  bool goes_forward = true;
};

Findings judge(const ClockFacts& facts);
ClockFacts inspect_clock();

}  // namespace maniple::doctor
