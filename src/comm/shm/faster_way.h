// Chooses the faster of two variants of an operation by measuring both.
//
// The speed at which the kernel copies out of another process, and at which a core gets what another core has just
// written, differs by factors between machines, and depends on whether the buffers were written since the last call. So
// no fixed table of sizes is right everywhere. Both variants are measured for several calls at first and again in every
// period, because a program's use of its buffers changes. The shortest measurement of a variant counts: disturbances
// only make a call longer.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

namespace maniple {

class FasterWay {
 public:
  static constexpr std::uint32_t kTries = 3;
  /// Calls per period. The first periods are short, because the cost of a program's first calls does not predict later
  /// ones.
  static constexpr std::uint32_t kShortest = 16;
  static constexpr std::uint32_t kLongest = 1024;
  static constexpr double kBetter = 0.95;  ///< switch only below this fraction of the current cost

  /// The variant (0 or 1) the next call should use. The first calls use `at_first`.
  int next(int at_first) noexcept {
    if (period_ == 0) {
      period_ = kShortest;
      way_ = at_first;
    }
    return is_tried() ? 1 - way_ : way_;
  }
  /// Adds the cost of the call that used the variant from `next`. Do not add a failed call: the next call then uses the
  /// same variant again.
  void add(double cost) noexcept {
    if (place_ == 0) least_.fill(std::numeric_limits<double>::infinity());
    double& least = least_[is_tried() ? 1 - way_ : way_];
    least = std::min(least, cost);
    ++place_;
    if (place_ == 2 * kTries) {
      const std::size_t now = way_;
      if (least_[1 - now] < kBetter * least_[now]) way_ = 1 - way_;
    } else if (place_ == period_) {
      place_ = 0;
      period_ = std::min(4 * period_, kLongest);
    }
  }

 private:
  /// Each period first measures the variant that was faster, then the other.
  bool is_tried() const noexcept { return place_ >= kTries && place_ < 2 * kTries; }

  std::uint32_t place_ = 0;  // position of the next call in this period
  std::uint32_t period_ = 0;
  int way_ = 0;
  std::array<double, 2> least_{};
};

}  // namespace maniple
