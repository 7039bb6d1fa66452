// What the mesh algorithms are made of: views of an operation's buffers, slices and chunks of them, and two ways of
// reducing slice by slice, directly and round a ring.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "comm/base/rank_arithmetic.h"
#include "comm/call/operation.h"
#include "comm/collective/reduce/reduce.h"
#include "comm/transport/exchange.h"

namespace maniple {

inline std::span<const std::byte> bytes_at(const std::byte* base, std::size_t element, Slice slice) noexcept {
  return slice.count == 0 ? std::span<const std::byte>()
                          : std::span(base + slice.offset * element, slice.count * element);
}
inline std::span<std::byte> bytes_at(std::byte* base, std::size_t element, Slice slice) noexcept {
  return slice.count == 0 ? std::span<std::byte>() : std::span(base + slice.offset * element, slice.count * element);
}

inline Slice part_of(const Parts& parts, int rank) noexcept { return {parts.offset(rank), parts.count(rank)}; }

/// `total` elements cut into one nearly equal part per rank.
inline Parts even_parts(std::size_t total, int ranks) {
  std::vector<std::size_t> counts(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) counts[static_cast<std::size_t>(rank)] = slice_of(total, ranks, rank).count;
  return Parts(counts);
}

/// Copies unless it is the same memory; overlaps are allowed.
inline void move_bytes(std::byte* to, const std::byte* from, std::size_t size) noexcept {
  if (to != from && size > 0) std::memmove(to, from, size);
}

/// Chunks: what is moved and reduced at a time, so that the one overlaps with the other. At least one, also of nothing.
struct Chunks {
  Slice whole;
  std::size_t each = 1;  ///< elements

  std::size_t count() const noexcept { return whole.count == 0 ? 1 : (whole.count - 1) / each + 1; }
  Slice at(std::size_t i) const noexcept {
    const std::size_t begin = i * each;
    if (begin >= whole.count) return {whole.offset, 0};
    return {whole.offset + begin, whole.count - begin < each ? whole.count - begin : each};
  }
};

/// Elements of a chunk for slices of up to `largest` elements: large enough that a system call is cheap in comparison,
/// small enough that several stay in the cache of a core and that a slice has several of them.
inline std::size_t chunk_elements(std::size_t largest, std::size_t element) noexcept {
  constexpr std::size_t kLargest = std::size_t{256} << 10;
  constexpr std::size_t kSmallest = std::size_t{64} << 10;
  constexpr std::size_t kChunksPerSlice = 2;
  const std::size_t bytes = std::clamp(largest * element / kChunksPerSlice, kSmallest, kLargest);
  return std::max<std::size_t>(bytes / 64 * 64 / element, 1);
}

// Reducing by slices: the common part of reduce_scatter, all_reduce and reduce in their direct form.
//
// Words: the buffer is cut into one *slice* for each rank, its owner; a slice is cut into *chunks*. Everyone sends the
// owner its *raw* chunks; the owner reduces each chunk over all ranks in rank order and sends the *reduced* one to the
// audience (none, the root, everyone). The audience's part of the pipeline runs some chunks (the *lag*) behind: on
// every connection raw chunk t comes before reduced chunk t - lag, so that both directions stay full while the owner
// reduces.
//
// Cost for a rank, n ranks, buffer of B bytes: sends (n-1)/n B raw, and (n-1)/n B reduced for an audience of everyone
// (B/n for the root); two steps of latency. Scratch: n (lag+1) chunks.

struct SliceWork {
  enum class Audience { none, root, everyone };

  const std::byte* in = nullptr;  ///< all slices
  Parts slices;
  Reduction reduction;
  std::byte* own = nullptr;  ///< where this rank's reduced slice goes; null: in scratch
  std::byte* all = nullptr;  ///< where the others' reduced slices go, if this rank is in the audience
  Audience audience = Audience::none;
  int root = 0;
};

/// Returns this rank's reduced slice when everything is in place. `own` may be this rank's slice of `in`, and `all` may
/// be `in`.
std::span<const std::byte> reduce_by_slices(Exchange& exchange, const SliceWork& work);

/// For small buffers: everyone in the audience gets all operands and reduces them itself, in rank order, in one step.
/// Cost: (n-1) B sent for an audience of everyone. Others give and get headers.
inline constexpr std::size_t kSmallReduceBytes = 16 << 10;
void reduce_at_once(Exchange& exchange, const Operation& operation, SliceWork::Audience audience);

// The two halves of the ring algorithms. Everyone sends only to the next rank and receives only from the one before.
//
// Words: the buffer is cut into one *slice* for each rank, a slice into *chunks*. In n-1 *steps* a slice travels once
// round the ring. In the first half each rank adds its own operand to what passes (a *partial result*) until the slice
// arrives complete at its owner; in the second the complete slices travel on as they are. Chunks are passed on as they
// arrive, so a step does not wait for the end of the one before.
//
// Cost of each half, n ranks, buffer of B bytes: n-1 steps; (n-1)/n B sent by each rank and the same received.
// The order of additions for slice j is j+1, j+2, ..., j: fixed, but not the same for all slices.

/// Reduces the slices of `operation.in`; this rank's goes to `own` (may be its place in the input), or stays in scratch
/// when that is null. Returns it. Sends may still be under way: wait_all() before the input is overwritten.
std::span<const std::byte> ring_reduce_slices(Exchange& exchange, const Operation& operation, const Parts& slices,
                                              std::byte* own);

/// Spreads the slices of `all`, of which this rank holds its own.
void ring_gather_slices(Exchange& exchange, std::byte* all, const Parts& slices, std::size_t element);

}  // namespace maniple
