// What an operation moves: for each peer, which bytes of `in` it reads, and where what is read from it goes in `out`.
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

  std::vector<Range> send;   ///< of `in`: what each rank reads, this rank included
  std::vector<Range> recv;   ///< of `out`: where it goes
  std::size_t in_bytes = 0;  ///< the whole of `in` and `out`
  std::size_t out_bytes = 0;
  std::size_t largest = 0;      ///< bytes between two ranks; the same on all ranks, unless `pairwise`
  bool one_for_all = false;     ///< every rank reads the same range
  bool read_by_others = false;  ///< this rank's `in` is
  bool pairwise = false;        ///< only the two ranks of a pair know how much is sent between them
  bool reduces = false;         ///< what is received becomes one
  std::uint64_t signature = 0;  ///< hash of what all ranks must have in common

  /// What a pair must have in common, of what the one sends to the other.
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

/// How many ranks' worth an average is divided by at the end of this call; 1: not at all.
int divisor(const Operation& operation, int ranks) noexcept;

}  // namespace maniple::cuda_plugin
