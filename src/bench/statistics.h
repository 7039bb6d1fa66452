// Order statistics of timings.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace maniple::bench {

/// The smallest sample that at least `fraction` of all samples do not exceed (nearest rank); 0 of no samples.
inline double percentile(std::vector<double> samples, double fraction) {
  if (samples.empty()) return 0;
  const double rank = std::ceil(fraction * static_cast<double>(samples.size()));
  const auto index = std::min(samples.size() - 1, static_cast<std::size_t>(std::max(0.0, rank - 1)));
  std::nth_element(samples.begin(), samples.begin() + static_cast<std::ptrdiff_t>(index), samples.end());
  return samples[index];
}

inline double median(std::vector<double> samples) { return percentile(std::move(samples), 0.5); }

}  // namespace maniple::bench
