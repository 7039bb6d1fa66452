// One line of results, and its JSON: the schema that every measured system prints and `--json` writes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace maniple::bench {

struct Row {
  std::string op;
  std::string backend;
  std::string transport;
  std::string buffer;
  int ranks = 0;
  std::uint64_t bytes = 0;
  double median_us = 0;
  double p99_us = 0;
  double algbw_gbps = 0;  ///< bytes / median, 1e9 bytes a second
  double busbw_gbps = 0;
  std::string dtype;
  std::string algorithm;
  std::uint64_t iterations = 0;
  int hosts = 1;
  std::string link;   ///< rate of a host's link when shaped, "1gbit"
  std::string error;  ///< not empty: the figures mean nothing
};

void to_json(nlohmann::json& json, const Row& row);
void from_json(const nlohmann::json& json, Row& row);

std::string to_line(const Row& row);                       ///< JSON without a newline
std::optional<Row> parse_row_line(std::string_view line);  ///< nullopt: not a row (programs also print other things)

/// Order statistics of timings: the smallest sample that at least `fraction` of all samples do not exceed (nearest rank); 0 of no samples.
inline double percentile(std::vector<double> samples, double fraction) {
  if (samples.empty()) return 0;
  const double rank = std::ceil(fraction * static_cast<double>(samples.size()));
  const auto index = std::min(samples.size() - 1, static_cast<std::size_t>(std::max(0.0, rank - 1)));
  std::nth_element(samples.begin(), samples.begin() + static_cast<std::ptrdiff_t>(index), samples.end());
  return samples[index];
}

inline double median(std::vector<double> samples) { return percentile(std::move(samples), 0.5); }

/// Sets the bandwidths from bytes and median.
void set_bandwidth(Row& row);

/// Repetitions of the same measurement as one: the median of medians and of p99s; an error of any is kept.
Row merge(const std::vector<Row>& repetitions);

}  // namespace maniple::bench
