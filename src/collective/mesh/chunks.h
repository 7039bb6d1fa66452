// How the mesh algorithms cut an operation's buffers: views of parts and slices, chunks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "call/operation.h"
#include "topology/rank_arithmetic.h"

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

/// Whether the result of a reduce_scatter lies in its input, but not at the place of this rank's part: then it may be
/// written only when nothing of the input is needed any more.
inline bool result_covers_other_input(const Operation& operation, int rank) noexcept {
  const std::byte* const own = operation.in + operation.parts.offset(rank) * operation.element();
  const std::byte* const end = operation.in + operation.parts.total() * operation.element();
  return operation.out != own && operation.out >= operation.in && operation.out < end;
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

/// Elements of a chunk for slices of up to `largest` elements: large enough that a system call is cheap in comparison, small
/// enough that several stay in the cache of a core and that a slice has several of them.
inline std::size_t chunk_elements(std::size_t largest, std::size_t element) noexcept {
  constexpr std::size_t kLargest = std::size_t{256} << 10;
  constexpr std::size_t kSmallest = std::size_t{64} << 10;
  constexpr std::size_t kChunksPerSlice = 4;
  const std::size_t bytes = std::clamp(largest * element / kChunksPerSlice, kSmallest, kLargest);
  return std::max<std::size_t>(bytes / 64 * 64 / element, 1);
}

}  // namespace maniple
