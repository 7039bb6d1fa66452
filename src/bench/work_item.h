// What a measuring process is asked to do: one operation at several sizes (WorkItem), and each of those sizes as the buffers of
// every rank (Case).
//
// A work item is passed as one JSON argument, so that our own workers, the peers' programs and the limit programs all read it the same
// way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <maniple/comm/types.h>

namespace maniple::bench {

/// An operation on one buffer size.
///
/// `bytes` is the size of the whole buffer, in the sense of nccl-tests: for operations that cut a buffer into one part
/// per rank (gather, all_gather, scatter, reduce_scatter, all_to_all) it is the sum of all parts. Sizes are rounded so
/// that every part holds at least one whole element, and the rounded size is what is reported.
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

/// Operations that `maniple bench` measures, in the order of `bench all`. `send` is a ping-pong of ranks 0 and 1, of
/// which half the round trip is reported.
const std::vector<Op>& measured_operations();

bool is_reduction(Op op) noexcept;
bool has_parts(Op op) noexcept;

/// Bus bandwidth = bytes / time * this: what the slowest link carries when the operation is done optimally.
double bus_factor(Op op, int ranks) noexcept;

/// Trips between ranks that one timed call makes: 2 for the ping-pong of `send`.
inline double trips(Op op) noexcept { return op == Op::send ? 2.0 : 1.0; }

struct WorkItem {
  std::string op = "all_reduce";
  std::string dtype = "float32";
  std::string reduce = "sum";
  int ranks = 2;
  std::vector<std::uint64_t> bytes;

  std::string backend = "native";   ///< name of the measured system, copied into the rows
  std::string transport = "auto";   ///< asked for; rows hold what was used
  std::string buffer = "ordinary";  ///< or "registered"
  std::string algorithm;            ///< empty: the system's own choice

  int iterations = 0;      ///< 0: as many as fit into the budget
  int warmup = -1;         ///< -1: by time
  double budget_s = 0.25;  ///< timed calls of one row
  double timeout_s = 300;  ///< for the whole item

  Case case_of(std::uint64_t size) const;
  std::vector<Case> cases() const;  ///< without sizes that round to the same buffer
};

std::string to_json_text(const WorkItem& item);
WorkItem parse_work_item(const std::string& json_text);  ///< throws InvalidArgument

}  // namespace maniple::bench
