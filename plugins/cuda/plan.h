// The data movement of an operation: for each peer, the bytes of `in` that the peer reads, and the place in `out` for
// the data read from the peer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/call/operation.h"

namespace maniple::cuda_plugin {

struct Range {
  std::size_t offset = 0;  ///< bytes
  std::size_t bytes = 0;
};

struct Plan {
  Plan(const Operation& operation, int rank, int ranks);

  std::vector<Range> send;   ///< the range of `in` that each rank reads, including this rank
  std::vector<Range> recv;   ///< the range of `out` for the data from each rank
  std::size_t in_bytes = 0;  ///< total sizes of `in` and `out`
  std::size_t out_bytes = 0;
  std::size_t largest = 0;      ///< maximum bytes between two ranks; the same on all ranks, unless `pairwise`
  bool one_for_all = false;     ///< every rank reads the same range
  bool read_by_others = false;  ///< other ranks read this rank's `in`
  bool pairwise = false;        ///< only the two ranks of a pair know how much is sent between them
  bool reduces = false;         ///< the received data is reduced
  std::uint64_t signature = 0;  ///< hash of the values on which all ranks must agree

  /// Hash of the values on which the two ranks of a pair must agree, for the data that one sends to the other.
  std::uint64_t signature_of(Range range) const noexcept;
};

/// Mixes a value into a hash.
constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t value) noexcept {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
  hash ^= hash >> 32;
  hash *= 0xd6e8feb86659fd93ULL;
  return hash ^ hash >> 29;
}

/// Whether types.h gives the reduce op a meaning for the dtype.
bool can_reduce(DType dtype, ReduceOp::Kind kind) noexcept;

/// The number of ranks by which an average is divided at the end of this call; 1: no division.
int divisor(const Operation& operation, int ranks) noexcept;

}  // namespace maniple::cuda_plugin
