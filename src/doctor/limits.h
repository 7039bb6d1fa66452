// What the system allows this user and this container: open files, memory, processes.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "doctor/finding.h"

namespace maniple::doctor {

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
LimitFacts look_at_limits();

/// "max", a number, or nonsense (nullopt). The first version of control groups writes a huge number for no limit.
std::optional<std::uint64_t> parse_group_limit(std::string_view text);

}  // namespace maniple::doctor
