#include "shm/competition.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>
#include <utility>

#include "base/files.h"

namespace maniple {

bool Competition::is_in_gap(double from, double to, std::optional<double> delay) noexcept {
  constexpr double kSlice = 1e-3;
  constexpr double kGoodPart = 1.0 / 16;
  if (!delay) return true;
  const std::optional<double> before = std::exchange(last_, to);
  const double delayed = *delay - std::exchange(last_delay_, *delay);
  if (!before) return false;  // nothing to compare with yet
  if (to - from >= kSlice && delayed >= (to - from) / 2) return true;
  return delayed >= (to - *before) * kGoodPart;
}

std::optional<double> Competition::delay_of_thread() noexcept try {
  const std::string text = file_text("/proc/thread-self/schedstat");  // ns that it ran, ns that it was ready to, ...
  const char* const end = text.data() + text.size();
  const char* const second = std::find(text.data(), end, ' ');
  std::uint64_t delay_ns = 0;
  if (second == end || std::from_chars(second + 1, end, delay_ns).ec != std::errc()) return std::nullopt;
  return static_cast<double>(delay_ns) * 1e-9;
} catch (...) {  // no memory for the text
  return std::nullopt;
}

}  // namespace maniple
