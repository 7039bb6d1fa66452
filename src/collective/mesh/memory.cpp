#include "collective/mesh/memory.h"

#include <algorithm>
#include <vector>

namespace maniple {
namespace {
// Large enough that a system call is cheap in comparison, small enough that several stay in the cache of a core and
// that a slice has several of them.
constexpr std::size_t kLargestChunk = std::size_t{256} << 10;
constexpr std::size_t kSmallestChunk = std::size_t{64} << 10;
constexpr std::size_t kWantedChunks = 4;
}  // namespace

Parts even_parts(std::size_t total, int ranks) {
  std::vector<std::size_t> counts(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) counts[static_cast<std::size_t>(rank)] = slice_of(total, ranks, rank).count;
  return Parts(counts);
}

std::size_t chunk_elements(std::size_t largest, std::size_t element) noexcept {
  const std::size_t bytes = std::clamp(largest * element / kWantedChunks, kSmallestChunk, kLargestChunk);
  return std::max<std::size_t>(bytes / 64 * 64 / element, 1);
}

}  // namespace maniple
