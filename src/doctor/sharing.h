// Memory that ranks of one host share, and the way it is handed over.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "doctor/finding.h"

namespace maniple::doctor {

struct SharingFacts {
  std::string memfd_problem = {};  ///< making, mapping and writing shared memory; empty: it works
  std::string pass_problem = {};   ///< a descriptor over a Unix socket (SCM_RIGHTS)
  std::optional<std::uint64_t> dev_shm_bytes = std::nullopt;  ///< free in /dev/shm
};

Findings judge(const SharingFacts& facts);
SharingFacts look_at_sharing();

}  // namespace maniple::doctor
