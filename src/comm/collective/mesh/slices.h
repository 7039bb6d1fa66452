// Building blocks of the mesh algorithms: views of an operation's buffers, their slices and chunks, and two ways to
// reduce slice by slice, directly and round a ring.
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

/// Cuts `total` elements into one nearly equal part per rank.
inline Parts even_parts(std::size_t total, int ranks) {
  std::vector<std::size_t> counts(ranks);
  for (int rank = 0; rank < ranks; ++rank) counts[rank] = slice_of(total, ranks, rank).count;
  return Parts(counts);
}

/// Copies unless both are the same memory; they may overlap.
inline void move_bytes(std::byte* to, const std::byte* from, std::size_t size) noexcept {
  if (to != from && size > 0) std::memmove(to, from, size);
}

/// Cuts a slice into chunks, the unit of moving and reducing, so that the two overlap. An empty slice has one empty
/// chunk.
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

/// Elements per chunk for slices of up to `largest` elements: large enough to amortise a system call, small enough that
/// several chunks fit into a core's cache and a slice has several chunks.
inline std::size_t chunk_elements(std::size_t largest, std::size_t element) noexcept {
  constexpr std::size_t kLargest = std::size_t{256} << 10;
  constexpr std::size_t kSmallest = std::size_t{64} << 10;
  constexpr std::size_t kChunksPerSlice = 2;
  const std::size_t bytes = std::clamp(largest * element / kChunksPerSlice, kSmallest, kLargest);
  return std::max<std::size_t>(bytes / 64 * 64 / element, 1);
}

// Reduction by slices: the common part of the direct algorithms for reduce_scatter, all_reduce and reduce.
//
// Terms: the buffer is cut into one *slice* per rank, its owner; a slice is cut into *chunks*. Every rank sends the
// owner its *raw* chunks. The owner reduces each chunk over all ranks in rank order and sends the *reduced* chunk to
// the audience (none, the root, everyone). Reduced chunks run some chunks (the *lag*) behind raw ones: on every
// connection raw chunk t comes before reduced chunk t - lag, so that both directions stay full while the owner reduces.
//
// Cost per rank, for n ranks and a buffer of B bytes: sends (n-1)/n B raw, and (n-1)/n B reduced for an audience of
// everyone (B/n for the root); two steps of latency. Scratch: n (lag+1) chunks.

struct SliceWork {
  enum class Audience { none, root, everyone };

  const std::byte* in = nullptr;  ///< all slices
  Parts slices;
  Reduction reduction;
  std::byte* own = nullptr;  ///< destination of this rank's reduced slice; null: scratch memory
  std::byte* all = nullptr;  ///< destination of the others' reduced slices, if this rank is in the audience
  Audience audience = Audience::none;
  int root = 0;
};

/// Returns this rank's reduced slice once all results are in place. `own` may be this rank's slice of `in`, and `all`
/// may be `in`.
std::span<const std::byte> reduce_by_slices(Exchange& exchange, const SliceWork& work);

/// For small buffers: each rank in the audience receives all operands and reduces them itself, in rank order, in one
/// step. Cost: (n-1) B sent for an audience of everyone. Other pairs exchange headers only.
inline constexpr std::size_t kSmallReduceBytes = 16 << 10;
void reduce_at_once(Exchange& exchange, const Operation& operation, SliceWork::Audience audience);

// The two halves of the ring algorithms. Each rank sends only to the next rank and receives only from the previous one.
//
// Terms: the buffer is cut into one *slice* per rank, a slice into *chunks*. In n-1 *steps* a slice travels once round
// the ring. In the first half each rank adds its own operand to the passing *partial result* until the slice arrives
// complete at its owner; in the second half complete slices travel on unchanged. Chunks are forwarded as they arrive,
// so a step does not wait for the previous one to end.
//
// Cost of each half, for n ranks and a buffer of B bytes: n-1 steps; each rank sends (n-1)/n B and receives as much.
// The order of additions for slice j is j+1, j+2, ..., j: fixed, but different for each slice.

/// Reduces the slices of `operation.in` and returns this rank's slice. It goes to `own` (may be its place in the
/// input), or stays in scratch memory if `own` is null. Sends may still be in progress: call wait_all() before
/// overwriting the input.
std::span<const std::byte> ring_reduce_slices(Exchange& exchange, const Operation& operation, const Parts& slices,
                                              std::byte* own);

/// Distributes the slices of `all`, in which each rank has filled in its own.
void ring_gather_slices(Exchange& exchange, std::byte* all, const Parts& slices, std::size_t element);

}  // namespace maniple
