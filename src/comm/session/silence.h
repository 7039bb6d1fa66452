// How long a rank has been silent, as seen by an observer that may itself have been held up. Pure.
//
// The observer looks once in each period. A look that comes late shows that the observer did not run (starved, stopped,
// the machine asleep): what others sent in that time it could not have read, so only a part of that time counts.
// Heartbeats that are waiting to be read are read before the next look.
#pragma once

#include <algorithm>

namespace maniple {

class Silence {
 public:
  /// One look of the observer, `elapsed_s` after the one before. `heard`: something has arrived in between.
  void look(double elapsed_s, double period_s, bool heard) noexcept {
    seconds_ = heard ? 0 : seconds_ + std::min(elapsed_s, kMostPeriods * period_s);
  }
  /// Never more than the time since something arrived.
  double seconds() const noexcept { return seconds_; }

 private:
  static constexpr double kMostPeriods = 1.5;
  double seconds_ = 0;
};

}  // namespace maniple
