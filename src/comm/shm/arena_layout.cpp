#include "comm/shm/arena_layout.h"

#include <algorithm>
#include <charconv>
#include <string>

#include <fmt/format.h>

#include "comm/base/files.h"
#include <maniple/comm/error.h>
#include <maniple/comm/types.h>

namespace maniple {
namespace {

constexpr std::size_t kPage = ArenaLayout::kPage;
constexpr std::size_t kKiB = 1024;

constexpr std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

constexpr bool holds_every_dtype() {
  for (int i = 0; i < kDTypeCount; ++i) {
    if (size_of(static_cast<DType>(i)) > ArenaLayout::kLargestElement) return false;
  }
  return true;
}
static_assert(holds_every_dtype());

// The second-level cache of one core, in bytes; 0 if unknown. glibc reports it only on x86.
std::size_t second_level_cache() {
  std::size_t kib = 0;
  const std::string text = file_text("/sys/devices/system/cpu/cpu0/cache/index2/size");  // "2048K"
  std::from_chars(text.data(), text.data() + text.size(), kib);
  return kib * kKiB;
}

// Every rank repeats the work on all payloads, which grows with the number of ranks, so payloads shrink.
std::size_t payload_bytes_for(std::size_t ranks) {
  constexpr std::size_t kMax = 8 * kKiB;
  return ranks <= 4 ? kMax : std::max<std::size_t>(kKiB, 4 * kMax / ranks / kCacheLine * kCacheLine);
}

// Operations cut a slot into one cell per rank, and a cell holds at least one element.
std::size_t least_stage_bytes(std::size_t ranks) {
  return round_up(ArenaLayout::kStageSlots * round_up(ranks * ArenaLayout::kLargestElement, kCacheLine), kPage);
}

// Everything except the stage sizes and what follows the stages.
ArenaLayout fixed_part(int size) {
  const std::size_t n = size;
  ArenaLayout layout;
  layout.size = size;
  layout.payload_bytes = payload_bytes_for(n);
  layout.contributions = ArenaLayout::kHeaderBytes + round_up(n * ArenaLayout::kBlockBytes, kPage);
  const std::size_t all_contributions = n * ArenaLayout::kContributions;
  layout.payloads = layout.contributions + all_contributions * ArenaLayout::kContributionBytes;
  layout.stages = round_up(layout.payloads + all_contributions * layout.payload_bytes, kPage);
  // Pages of unused rings are never allocated, so small groups can afford large rings.
  layout.ring_capacity = (size <= 16 ? 256 : size <= 64 ? 64 : 4) * kKiB;
  layout.ring_stride = layout.ring_capacity + (size <= 16 ? 17 : 1) * kPage;  // 8 slots of 8 KiB and some more
  return layout;
}

std::size_t all_rings(const ArenaLayout& layout) {
  const std::size_t n = layout.size;
  return 2 * n * n * layout.ring_stride;
}

}  // namespace

ArenaLayout ArenaLayout::of(int size, std::size_t stage_bytes) {
  const std::size_t n = size;
  ArenaLayout layout = fixed_part(size);
  layout.stage_bytes = std::max(round_up(stage_bytes, kPage), least_stage_bytes(n));
  layout.stage_slot_bytes = layout.stage_bytes / kStageSlots / kCacheLine * kCacheLine;
  layout.rings = layout.stages + n * layout.stage_bytes;
  layout.bytes = layout.rings + all_rings(layout);
  return layout;
}

ArenaLayout ArenaLayout::within(int size, std::size_t segment_bytes) {
  const std::size_t least = of(size, 0).bytes;
  if (segment_bytes < least) {
    throw ProtocolError(fmt::format("shared memory of {} bytes or more expected, got {}", least, segment_bytes));
  }
  const ArenaLayout layout = fixed_part(size);
  return of(size, (segment_bytes - layout.stages - all_rings(layout)) / size / kPage * kPage);
}

std::size_t ArenaLayout::usual_stage_bytes(int size) {
  // Two ranks: the size of a core's second-level cache. Steps are long then, and data still moves from cache to cache.
  // More ranks do not gain from it (measured with 4, 8 and 16), and memory adds up.
  if (size <= 2) return std::clamp(second_level_cache() / kPage * kPage, 512 * kKiB, 2048 * kKiB);
  return (size <= 8 ? 512 : size <= 64 ? 256 : 64) * kKiB;
}

}  // namespace maniple
