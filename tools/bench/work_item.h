// The request to a measuring process and its reply. A WorkItem is one operation at several sizes, a Case is one of
// these sizes with the buffer sizes of every rank, and a Row is the result for one size.
//
// A work item is passed as one JSON argument, so that Maniple's workers, the peers' programs and the limit programs all
// read it the same way.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include <maniple/comm/types.h>

namespace maniple::bench {

/// An operation on one buffer size.
///
/// `bytes` is the size of the whole buffer, as in nccl-tests: for operations that cut a buffer into one part per rank
/// (gather, all_gather, scatter, reduce_scatter, all_to_all) it is the sum of all parts. Sizes are rounded so that
/// every part holds at least one whole element, and the rounded size is reported.
struct Case {
  Op op = Op::all_reduce;
  DType dtype = DType::float32;
  ReduceOp reduce = ReduceOp::sum;
  int ranks = 2;
  std::size_t count = 0;  ///< elements of the whole buffer

  static Case of(Op op, DType dtype, ReduceOp reduce, int ranks, std::uint64_t bytes);

  std::size_t bytes() const noexcept { return count * size_of(dtype); }
  std::size_t part() const noexcept { return count / static_cast<std::size_t>(ranks); }
  std::size_t in_count(int rank) const noexcept;   ///< elements that `rank` contributes
  std::size_t out_count(int rank) const noexcept;  ///< elements that `rank` must hold afterwards; 0: none to check
  bool in_place() const noexcept;                  ///< the result replaces the input
};

/// The operations of `maniple bench`, in the order of `bench all`. `send` is a ping-pong between ranks 0 and 1; half
/// the round trip is reported.
const std::vector<Op>& measured_operations();

bool is_reduction(Op op) noexcept;
bool has_parts(Op op) noexcept;

/// Bus bandwidth = bytes / time * bus_factor: the load of the slowest link if the operation is done optimally.
double bus_factor(Op op, int ranks) noexcept;

/// Trips between ranks in one timed call: 2 for the ping-pong of `send`.
inline double trips(Op op) noexcept { return op == Op::send ? 2.0 : 1.0; }

struct WorkItem {
  std::string op = "all_reduce";
  std::string dtype = "float32";
  std::string reduce = "sum";
  int ranks = 2;
  std::vector<std::uint64_t> bytes;

  std::string backend = "native";   ///< name of the measured system, copied into the rows
  std::string transport = "auto";   ///< the requested transport; rows hold the actual one
  std::string buffer = "ordinary";  ///< or "registered"
  std::string algorithm;            ///< empty: the system's own choice
  bool rewrite = false;             ///< inputs are rewritten before each call, untimed

  int iterations = 0;      ///< 0: as the time budget allows
  int warmup = -1;         ///< -1: by time
  double budget_s = 0.25;  ///< time for the timed calls of one row
  double timeout_s = 300;  ///< for the whole item

  Case case_of(std::uint64_t size) const;
  std::vector<Case> cases() const;  ///< without sizes that round to the same buffer
};

std::string to_json_text(const WorkItem& item);
WorkItem parse_work_item(const std::string& json_text);  ///< throws InvalidArgument

/// One line of results, and its JSON: the schema that every measured system prints and `--json` writes.
struct Row {
  std::string op;
  std::string backend;
  std::string transport;
  std::string buffer;
  int ranks = 0;
  std::uint64_t bytes = 0;
  double median_us = 0;
  double mean_us = 0;
  double p99_us = 0;
  double algbw_gbps = 0;  ///< bytes / median, in 1e9 bytes per second
  double busbw_gbps = 0;
  std::string dtype;
  std::string algorithm;
  std::uint64_t iterations = 0;
  int hosts = 1;
  std::string link;  ///< rate of the hosts' links if shaped: "1gbit"
  int busy = 0;      ///< processes that competed for the cores
  bool rewritten = false;
  std::string error;  ///< not empty: the figures are meaningless
};

void to_json(nlohmann::json& json, const Row& row);
void from_json(const nlohmann::json& json, Row& row);

std::string to_line(const Row& row);                       ///< JSON without a newline
std::optional<Row> parse_row_line(std::string_view line);  ///< nullopt: not a row (programs also print other things)

/// The nearest-rank percentile: the smallest sample that at least `fraction` of all samples do not exceed. 0 if there
/// are no samples.
inline double percentile(std::vector<double> samples, double fraction) {
  if (samples.empty()) return 0;
  const double rank = std::ceil(fraction * static_cast<double>(samples.size()));
  const auto index = std::min(samples.size() - 1, static_cast<std::size_t>(std::max(0.0, rank - 1)));
  std::nth_element(samples.begin(), samples.begin() + static_cast<std::ptrdiff_t>(index), samples.end());
  return samples[index];
}

inline double mean(const std::vector<double>& samples) {
  if (samples.empty()) return 0;
  return std::accumulate(samples.begin(), samples.end(), 0.0) / static_cast<double>(samples.size());
}

inline double median(std::vector<double> samples) { return percentile(std::move(samples), 0.5); }

/// Sets the bandwidths from bytes and median.
void set_bandwidth(Row& row);

/// Combines repetitions of one measurement: medians of the medians, means and p99s. Keeps an error of any repetition.
Row merge(const std::vector<Row>& repetitions);

// Sizes and quantities as text.

/// "4,1K,64K..16M": bytes, with K, M, G for KiB, MiB, GiB. A range grows by factors of 4 and includes its end. Throws
/// InvalidArgument naming the wrong part.
std::vector<std::uint64_t> parse_sizes(std::string_view text);

std::string format_bytes(std::uint64_t bytes);              ///< "4 B", "1 KiB", "256 MiB"; not whole: "1.5 MiB"
std::string format_time(double microseconds);               ///< "0.41 us", "13.2 ms", "1.20 s": three digits
std::string format_bandwidth(double gigabytes_per_second);  ///< "38.1 GB/s", "8.70 MB/s"
std::string three_digits(double value);                     ///< "0.41", "13.2", "812"

/// Splits "a,b" at commas; drops empty parts.
std::vector<std::string> split_list(std::string_view text);

}  // namespace maniple::bench
