// Which of two ways of doing the same thing is the faster one, here and now: found out by trying.
//
// How fast the kernel copies out of another process, and how fast a core gets what another has just written, differ
// between machines by factors, and with them whether the buffers were written since the last call. So no table of sizes
// is right everywhere. Both ways are tried, some calls each: at first, and again in every period, because what a
// program does with its buffers changes. Of the tries of a way the shortest counts: whatever disturbs a call makes it
// longer.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

namespace maniple {

class FasterWay {
 public:
  static constexpr std::uint32_t kTries = 3;
  /// Calls of a period. The first ones are short: what the first calls of a program cost says little of those that
  /// follow.
  static constexpr std::uint32_t kShortest = 16;
  static constexpr std::uint32_t kLongest = 1024;
  static constexpr double kBetter = 0.95;  ///< of the other's cost: what is as good as equal is left as it is

  /// Of two ways, 0 and 1, that of the next call. The first calls take the way `at_first`.
  int next(int at_first) noexcept {
    if (period_ == 0) {
      period_ = kShortest;
      way_ = at_first;
    }
    return is_tried() ? 1 - way_ : way_;
  }
  /// What the call that took the way `next` cost. One that failed is not added, and the next call takes that way once
  /// more.
  void add(double cost) noexcept {
    if (place_ == 0) least_.fill(std::numeric_limits<double>::infinity());
    double& least = least_[static_cast<std::size_t>(is_tried() ? 1 - way_ : way_)];
    least = std::min(least, cost);
    ++place_;
    if (place_ == 2 * kTries) {
      const auto now = static_cast<std::size_t>(way_);
      if (least_[1 - now] < kBetter * least_[now]) way_ = 1 - way_;
    } else if (place_ == period_) {
      place_ = 0;
      period_ = std::min(4 * period_, kLongest);
    }
  }

 private:
  /// In each period the way that was faster comes first, then the other.
  bool is_tried() const noexcept { return place_ >= kTries && place_ < 2 * kTries; }

  std::uint32_t place_ = 0;  // of the next call in this period
  std::uint32_t period_ = 0;
  int way_ = 0;
  std::array<double, 2> least_{};
};

}  // namespace maniple
