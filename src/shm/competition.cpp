#include "shm/competition.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>
#include <utility>

#include "base/files.h"

namespace maniple {

bool Competition::is_in_gap(double from, double to, std::optional<double> delay, double (*stolen)() noexcept) noexcept {
  if (!delay) return true;
  if (!looks_like_it(from, to, *delay)) return false;
  const double delayed = *delay - std::exchange(asked_delay_, *delay);
  const double now_stolen = stolen();
  // Counted in steps of 10 ms: one may be of a time before. Then the next gap tells.
  return now_stolen - std::exchange(asked_stolen_, now_stolen) < delayed / 2;
}

bool Competition::looks_like_it(double from, double to, double delay) noexcept {
  constexpr double kSlice = 1e-3;
  constexpr double kGoodPart = 1.0 / 16;
  const std::optional<double> before = std::exchange(last_, to);
  const double delayed = delay - std::exchange(last_delay_, delay);
  if (!before) return false;  // nothing to compare with yet
  if (to - from >= kSlice && delayed >= (to - from) / 2) return true;
  return delayed >= (to - *before) * kGoodPart;
}

bool Competition::is_in_gap_of_thread(double from, double to) noexcept {
  thread_local Competition competition;
  return competition.is_in_gap(from, to, delay_of_thread(), stolen_from_core);
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

double Competition::stolen_from_core() noexcept try {
  // "cpu3 user nice system idle iowait irq softirq steal ...", in steps of 10 ms
  constexpr int kFieldsBefore = 8;
  const std::string text = file_text("/proc/stat");
  const std::string name = "\ncpu" + std::to_string(::sched_getcpu()) + " ";
  std::size_t at = text.find(name);
  for (int field = 0; field < kFieldsBefore && at != std::string::npos; ++field) at = text.find(' ', at + 1);
  std::uint64_t ticks = 0;
  if (at == std::string::npos) return 0;
  std::from_chars(text.data() + at + 1, text.data() + text.size(), ticks);
  return static_cast<double>(ticks) / static_cast<double>(::sysconf(_SC_CLK_TCK));
} catch (...) {
  return 0;
}

}  // namespace maniple
