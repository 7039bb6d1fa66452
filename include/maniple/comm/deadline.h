// Deadline: a point in time by which an operation must finish.
//
//   const Deadline deadline = Deadline::after(std::chrono::seconds(30));
//   store->wait(keys, deadline);          // both waits together take at most 30 s
//   store->get("master", deadline);
//
// Layers pass deadlines down, not timeouts: an operation with many waits has one deadline, so its limit holds for all
// steps together. The clock is monotonic; a jump of the wall clock has no effect.
#pragma once

#include <algorithm>
#include <chrono>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  using Duration = Clock::duration;

  /// Never expires.
  constexpr Deadline() noexcept : when_(Clock::time_point::max()) {}
  explicit constexpr Deadline(Clock::time_point when) noexcept : when_(when) {}

  static constexpr Deadline never() noexcept { return Deadline(); }

  /// Expires `limit` from now. A limit of zero, less than zero or NaN has expired already; 1e9 s and more means never.
  template <class Rep, class Period>
  static Deadline after(std::chrono::duration<Rep, Period> limit) {
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(limit).count();
    if (seconds >= kForever) return never();
    if (!(seconds > 0)) return Deadline(now);
    return Deadline(now + std::chrono::duration_cast<Duration>(limit));
  }

  bool is_never() const noexcept { return when_ == Clock::time_point::max(); }
  bool expired() const noexcept { return !is_never() && Clock::now() >= when_; }
  Clock::time_point when() const noexcept { return when_; }

  /// Time left, never negative; `Duration::max()` for a deadline that never expires.
  Duration remaining() const noexcept {
    if (is_never()) return Duration::max();
    return std::max(Duration::zero(), when_ - Clock::now());
  }

  /// Milliseconds left for poll(2) and similar calls, rounded up: -1 for a deadline that never expires, otherwise 0 to
  /// `cap`.
  int poll_ms(int cap = 1'000'000) const noexcept {
    if (is_never()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(remaining()).count();
    return static_cast<int>(std::min<long long>(left, cap));
  }

  friend constexpr auto operator<=>(const Deadline&, const Deadline&) = default;
  static Deadline sooner(Deadline a, Deadline b) { return std::min(a, b); }

 private:
  static constexpr double kForever = 1e9;  // about 30 years, in seconds
  Clock::time_point when_;
};

}  // namespace maniple
