// Checks of what this machine lets a job have: limits of the user and the container, cores, room on disk.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "doctor/checks.h"

namespace maniple::doctor {

// --- What the system allows this user and this container: open files, memory, processes.

inline constexpr std::uint64_t kUnlimited = ~std::uint64_t{0};

struct LimitFacts {
  std::uint64_t files_soft = kUnlimited;
  std::uint64_t files_hard = kUnlimited;
  std::uint64_t locked_bytes = kUnlimited;
  std::uint64_t address_bytes = kUnlimited;
  std::uint64_t processes = kUnlimited;
  std::optional<std::uint64_t> memory_limit = std::nullopt;  ///< of the control group
  std::uint64_t memory_used = 0;
};

Findings judge(const LimitFacts& facts);
LimitFacts inspect_limits();

/// "max", a number, or nonsense (nullopt). The first version of control groups writes a huge number for no limit.
std::optional<std::uint64_t> parse_group_limit(std::string_view text);

// --- Cores that are there, cores that may be used, and what makes them slow.

struct ProcessorFacts {
  int online = 1;                              ///< of the machine
  int allowed = 1;                             ///< by the affinity of this process
  std::optional<double> quota = std::nullopt;  ///< cores' worth of time that the control group may use
  std::string huge_pages = {};                 ///< "always", "madvise", "never"; empty: not known
  std::string omp_threads = {};                ///< OMP_NUM_THREADS
};

Findings judge(const ProcessorFacts& facts);
ProcessorFacts inspect_processors();

/// "200000 100000" (version 2) -> 2; "max 100000" -> nullopt.
std::optional<double> parse_cpu_max(std::string_view text);
/// "always [madvise] never" -> "madvise"
std::string parse_choice(std::string_view text);

// --- Room for temporary files.

struct DiskFacts {
  std::string path;          ///< TMPDIR or /tmp
  std::string problem = {};  ///< why nothing can be written there
  std::uint64_t free_bytes = 0;
};

Findings judge(const DiskFacts& facts);
DiskFacts inspect_disk();

}  // namespace maniple::doctor
