// Cores that are there, cores that may be used, and what makes them slow.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "doctor/finding.h"

namespace maniple::doctor {

struct ProcessorFacts {
  int online = 1;                              ///< of the machine
  int allowed = 1;                             ///< by the affinity of this process
  std::optional<double> quota = std::nullopt;  ///< cores' worth of time that the control group may use
  std::string huge_pages = {};                 ///< "always", "madvise", "never"; empty: not known
  std::string omp_threads = {};                ///< OMP_NUM_THREADS
};

Findings judge(const ProcessorFacts& facts);
ProcessorFacts look_at_processors();

/// "200000 100000" (version 2) -> 2; "max 100000" -> nullopt.
std::optional<double> parse_cpu_max(std::string_view text);
/// "always [madvise] never" -> "madvise"
std::string parse_choice(std::string_view text);

}  // namespace maniple::doctor
