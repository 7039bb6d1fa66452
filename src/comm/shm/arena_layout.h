// The layout of an arena, as offsets from the start of its segment.
//
//   header | a block for each rank | contributions | their payloads |
//   a stage for each rank | rings of collectives | rings of messages
//
// A ring area holds a ring (head and `ring_capacity` bytes), followed by `slots_bytes` for small messages. Layouts are
// pure arithmetic: the rank that creates the segment chooses the stage size (`of`), and the others derive the same
// layout from the segment's size (`within`).
#pragma once

#include <cstddef>
#include <cstdint>

namespace maniple {

inline constexpr std::size_t kCacheLine = 128;

struct ArenaLayout {
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kHeaderBytes = 2 * kPage;
  static constexpr std::size_t kBlockBytes = 10 * kCacheLine;
  static constexpr std::size_t kContributionBytes = kCacheLine;
  static constexpr std::size_t kRingHeadBytes = 128;
  static constexpr std::size_t kLargestElement = 8;  ///< largest dtype, in bytes
  static constexpr int kStageSlots = 4;
  static constexpr int kContributions = 16;

  /// `stage_bytes` is the stage size of each rank. It is rounded up to whole pages and to at least one element per rank
  /// in every slot.
  static ArenaLayout of(int size, std::size_t stage_bytes);
  /// The layout of a segment created with `of`. Throws ProtocolError if the segment is too small.
  static ArenaLayout within(int size, std::size_t segment_bytes);
  /// The default stage size of each rank.
  static std::size_t usual_stage_bytes(int size);

  std::size_t stage_slot(int rank, std::uint32_t step) const noexcept {
    return stages + rank * stage_bytes + step % kStageSlots * stage_slot_bytes;
  }
  /// Offset of the ring from one rank to another. `set`: 0 for collectives, 1 for messages.
  std::size_t ring(int set, int from, int to) const noexcept {
    const std::size_t n = size;
    return rings + ((set * n + from) * n + to) * ring_stride;
  }
  std::size_t slots(int from, int to) const noexcept { return ring(1, from, to) + ring_bytes(); }
  std::size_t ring_bytes() const noexcept { return kRingHeadBytes + ring_capacity; }
  std::size_t slots_bytes() const noexcept { return ring_stride - ring_bytes(); }

  int size = 1;                   ///< number of ranks
  std::size_t contributions = 0;  ///< after the header and the rank blocks
  std::size_t payloads = 0;
  std::size_t payload_bytes = 0;  ///< the largest payload of a contribution
  std::size_t stages = 0;
  std::size_t stage_bytes = 0;  ///< per rank
  std::size_t stage_slot_bytes = 0;
  std::size_t rings = 0;
  std::size_t ring_capacity = 0;  ///< a power of two
  std::size_t ring_stride = 0;    ///< distance between rings
  std::size_t bytes = 0;          ///< size of the segment
};

}  // namespace maniple
