#include "comm/shm/competition.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>
#include <utility>

#include "comm/base/files.h"

namespace maniple {

bool Competition::is_in_gap(double from, double to, std::optional<double> delay, double (*stolen)() noexcept) noexcept {
  if (!delay) return true;
  return is_delayed(from, to, *delay) && !is_by_host({to, *delay, stolen()});
}

bool Competition::is_delayed(double from, double to, double delay) noexcept {
  constexpr double kSlice = 1e-3;
  constexpr double kWindow = 10e-3;
  constexpr double kGoodPart = 1.0 / 16;
  const double in_gap = delay - std::exchange(last_delay_, delay);
  if (!std::exchange(any_, true)) {
    window_ = {to, delay, 0};
    return false;  // nothing to compare with yet
  }
  if (to - from >= kSlice && in_gap >= (to - from) / 2) return true;
  if (to - window_.when < kWindow) return false;
  const Seen since = std::exchange(window_, {to, delay, 0});
  return delay - since.delay >= (to - since.when) * kGoodPart;
}

// Whether the host took at least as much time as this thread was delayed. The kernel counts stolen time in steps of 10
// ms, so the comparison covers many steps.
bool Competition::is_by_host(const Seen& now) noexcept {
  constexpr double kLongEnough = 100e-3;
  if (now.when - asked_.when >= kLongEnough) before_ = std::exchange(asked_, now);
  return now.stolen - before_.stolen > 0 && now.stolen - before_.stolen >= now.delay - before_.delay;
}

bool Competition::is_in_gap_of_thread(double from, double to) noexcept {
  thread_local Competition competition;
  return competition.is_in_gap(from, to, delay_of_thread(), stolen_from_core);
}

std::optional<double> Competition::delay_of_thread() noexcept try {
  const std::string text = file_text("/proc/thread-self/schedstat");  // ns running, ns ready, ...
  const char* const end = text.data() + text.size();
  const char* const second = std::find(text.data(), end, ' ');
  std::uint64_t delay_ns = 0;
  if (second == end || std::from_chars(second + 1, end, delay_ns).ec != std::errc()) return std::nullopt;
  return static_cast<double>(delay_ns) * 1e-9;
} catch (...) {  // out of memory for the text
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
