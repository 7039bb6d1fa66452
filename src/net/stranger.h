// Guesses what a program that is not ours wanted, from its first bytes: for the log.
#pragma once

#include <string_view>

namespace maniple {

/// "HTTP client on training port", ...; "not a Maniple peer (wrong magic)" when it is none of the known ones.
std::string_view describe_stranger(std::string_view first_bytes) noexcept;

}  // namespace maniple
