#include "comm/shm/arena_layout.h"

#include <gtest/gtest.h>

#include <bit>
#include <string>
#include <utility>
#include <vector>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

std::vector<int> sizes() {
  std::vector<int> result;
  for (int n = 1; n <= 130; ++n) result.push_back(n);
  result.insert(result.end(), {255, 256, 257, 520, 1000, 2064, 4097});
  return result;
}

// Regions that must lie behind each other, in this order.
class Regions {
 public:
  explicit Regions(const ArenaLayout& layout) : layout_(layout) {}
  void add(const char* name, std::size_t at, std::size_t bytes, std::size_t alignment) {
    EXPECT_EQ(at % alignment, 0u) << name << " at " << at << ", ranks: " << layout_.size;
    EXPECT_GE(at, end_) << name << " overlaps what lies before it, ranks: " << layout_.size;
    EXPECT_GT(bytes, 0u) << name << " is empty, ranks: " << layout_.size;
    end_ = at + bytes;
    EXPECT_LE(end_, layout_.bytes) << name << " ends outside the segment, ranks: " << layout_.size;
  }

 private:
  const ArenaLayout& layout_;
  std::size_t end_ = 0;
};

void check(const ArenaLayout& layout) {
  const auto n = static_cast<std::size_t>(layout.size);
  Regions regions(layout);
  regions.add("header", 0, ArenaLayout::kHeaderBytes, ArenaLayout::kPage);
  regions.add("blocks", ArenaLayout::kHeaderBytes, n * ArenaLayout::kBlockBytes, kCacheLine);
  regions.add("contributions", layout.contributions, n * ArenaLayout::kContributions * ArenaLayout::kContributionBytes,
              kCacheLine);
  regions.add("payloads", layout.payloads, n * ArenaLayout::kContributions * layout.payload_bytes, kCacheLine);
  for (int rank = 0; rank < layout.size; ++rank) {
    for (std::uint32_t step = 0; step < ArenaLayout::kStageSlots; ++step) {
      regions.add("stage slot", layout.stage_slot(rank, step), layout.stage_slot_bytes, kCacheLine);
    }
  }
  // Rings are equal, so some are enough: the first ones and the last ones.
  for (int set = 0; set < 2; ++set) {
    for (const int from : {0, layout.size - 1}) {
      for (int to = 0; to < layout.size && (from == 0 || layout.size > 1); ++to) {
        regions.add("ring", layout.ring(set, from, to), layout.ring_bytes(), 64);
        if (set == 1) regions.add("slots", layout.slots(from, to), layout.slots_bytes(), 64);
      }
      if (layout.size == 1) break;
    }
  }
  EXPECT_TRUE(std::has_single_bit(layout.ring_capacity)) << layout.size;
  EXPECT_GE(layout.slots_bytes(), 9u * 64) << "8 slots and their counter, ranks: " << layout.size;
  EXPECT_GE(layout.stage_slot_bytes / n, ArenaLayout::kLargestElement)
      << "a cell for each rank, ranks: " << layout.size;
}

TEST(ArenaLayout, RegionsOfAnyNumberOfRanksLieApartAndInside) {
  for (const int size : sizes()) {
    for (const std::size_t stage : {std::size_t{0}, std::size_t{16} << 10, ArenaLayout::usual_stage_bytes(size)}) {
      check(ArenaLayout::of(size, stage));
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(ArenaLayout, EveryRankDerivesTheMakersLayoutFromTheSize) {
  for (const int size : sizes()) {
    for (const std::size_t stage : {std::size_t{0}, std::size_t{16} << 10, std::size_t{1} << 20}) {
      const ArenaLayout made = ArenaLayout::of(size, stage);
      const ArenaLayout found = ArenaLayout::within(size, made.bytes);
      EXPECT_EQ(found.bytes, made.bytes) << size;
      EXPECT_EQ(found.stage_bytes, made.stage_bytes) << size;
      EXPECT_EQ(found.stage_slot_bytes, made.stage_slot_bytes) << size;
      EXPECT_EQ(found.rings, made.rings) << size;
    }
  }
}

TEST(ArenaLayout, ASegmentThatIsTooSmallIsRefused) {
  for (const int size : {1, 2, 66, 520}) {
    EXPECT_THROW(ArenaLayout::within(size, ArenaLayout::of(size, 0).bytes - 1), ProtocolError) << size;
    EXPECT_THROW(ArenaLayout::within(size, 0), ProtocolError) << size;
  }
}

}  // namespace
}  // namespace maniple
