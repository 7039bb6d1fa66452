// How long a rank has been silent, as measured by an observer that may itself have been held up. No I/O.
//
// The observer checks once per period. A late check shows that the observer did not run (starved, stopped, the machine
// asleep) and could not read heartbeats in that time, so only a part of that time counts. Pending heartbeats are read
// before the next check.
#pragma once

#include <algorithm>

namespace maniple {

class Silence {
 public:
  /// One check, `elapsed_s` after the previous one. `heard`: something has arrived in between.
  void look(double elapsed_s, double period_s, bool heard) noexcept {
    seconds_ = heard ? 0 : seconds_ + std::min(elapsed_s, kMostPeriods * period_s);
  }
  /// Never more than the real time since something arrived.
  double seconds() const noexcept { return seconds_; }

 private:
  static constexpr double kMostPeriods = 1.5;
  double seconds_ = 0;
};

}  // namespace maniple
