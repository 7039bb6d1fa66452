// A logarithmic axis: where values lie and which of them get a label.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace maniple::bench {

class LogAxis {
 public:
  /// Covers low..high (both positive) on the pixels from..to.
  LogAxis(double low, double high, double from, double to) : low_(low), high_(high), from_(from), to_(to) {}

  double at(double value) const { return from_ + (to_ - from_) * std::log(value / low_) / std::log(high_ / low_); }
  double low() const noexcept { return low_; }
  double high() const noexcept { return high_; }

  /// Powers of ten inside the axis; with 2 and 5 between them where that leaves few labels.
  std::vector<double> decimal_ticks() const {
    const double decades = std::log10(high_ / low_);
    const auto steps = decades < 3.2 ? std::vector<double>{1, 2, 5} : std::vector<double>{1};
    std::vector<double> ticks;
    for (double power = std::pow(10, std::floor(std::log10(low_))); power <= high_ * 1.001; power *= 10) {
      for (const double step : steps) {
        const double value = power * step;
        if (value >= low_ * 0.999 && value <= high_ * 1.001) ticks.push_back(value);
      }
    }
    return ticks;
  }

  /// Powers of two inside the axis, at most `most` of them, evenly apart.
  std::vector<double> binary_ticks(int most) const {
    const int first = static_cast<int>(std::ceil(std::log2(low_) - 1e-6));
    const int last = static_cast<int>(std::floor(std::log2(high_) + 1e-6));
    const int step = std::max(2, ((last - first) / most + 2) / 2 * 2);
    std::vector<double> ticks;
    for (int power = (first + step - 1) / step * step; power <= last; power += step) ticks.push_back(std::exp2(power));
    return ticks;
  }

 private:
  double low_, high_, from_, to_;
};

}  // namespace maniple::bench
