#include "comm/shm/registered_table.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

constexpr std::size_t kPage = 4096;

// Two ranks of one host, each with a mapping of its own.
class Registered : public testing::Test {
 protected:
  struct Rank {
    std::shared_ptr<Segment> segment;
    std::shared_ptr<RegisteredTable> table = std::make_shared<RegisteredTable>();
    std::optional<RegisteredMemory> memory;
  };
  void SetUp() override {
    ranks[0].segment = Segment::create(RegisteredTable::segment_bytes(kSizes));
    ranks[1].segment =
        Segment::adopt(UniqueFd(::fcntl(ranks[0].segment->fd(), F_DUPFD_CLOEXEC, 0)), ranks[0].segment->size());
    for (int r = 0; r < 2; ++r) ranks[r].memory = ranks[r].table->add(ranks[r].segment, kSizes, r);
  }
  static std::byte* bytes_of(const Rank& rank) { return static_cast<std::byte*>(rank.memory->data()); }

  static constexpr std::size_t kSizes[2] = {5000, 100};
  Rank ranks[2];
};

TEST_F(Registered, EveryPartHasPagesOfItsOwn) {
  EXPECT_EQ(RegisteredTable::segment_bytes(kSizes), kPage + 2 * kPage + kPage);
  EXPECT_EQ(RegisteredTable::segment_bytes(std::vector<std::size_t>{0, 0}), kPage);
  EXPECT_EQ(bytes_of(ranks[0]) - ranks[0].segment->data(), std::ptrdiff_t{kPage});
  EXPECT_EQ(bytes_of(ranks[1]) - ranks[1].segment->data(), std::ptrdiff_t{3 * kPage});
  EXPECT_EQ(ranks[0].memory->size(), 5000u);
  EXPECT_EQ(ranks[1].memory->size(), 100u);
}

TEST_F(Registered, MemoryIsRecognisedByItsAddress) {
  const RegisteredTable& table = *ranks[0].table;
  std::byte* const begin = bytes_of(ranks[0]);
  EXPECT_NE(table.find(begin, 5000).segment, 0u);
  EXPECT_EQ(table.find(begin, 5000).offset, kPage);
  EXPECT_EQ(table.find(begin + 4999, 1).offset, kPage + 4999);
  EXPECT_EQ(table.find(begin, 5001).segment, 0u);
  EXPECT_EQ(table.find(begin + 4999, 2).segment, 0u);
  EXPECT_EQ(table.find(begin - 1, 2).segment, 0u);
  EXPECT_EQ(table.find(ranks[0].segment->data() + 3 * kPage, 1).segment, 0u);  // another rank's part
  const int ordinary = 0;
  EXPECT_EQ(table.find(&ordinary, sizeof ordinary).segment, 0u);
}

TEST_F(Registered, APeersReferenceLeadsToTheSameBytes) {
  const SharedRef ref = ranks[1].table->find(bytes_of(ranks[1]) + 10, 90);
  ASSERT_NE(ref.segment, 0u);
  bytes_of(ranks[1])[10] = std::byte{42};
  const std::byte* const seen = ranks[0].table->resolve(ref, 90);
  EXPECT_NE(seen, bytes_of(ranks[1]) + 10);
  EXPECT_EQ(*seen, std::byte{42});
}

TEST_F(Registered, ReferencesToNothingAreRefused) {
  const RegisteredTable& table = *ranks[0].table;
  const SharedRef mine = table.find(bytes_of(ranks[0]), 1);
  const std::uint64_t size = ranks[0].segment->size();
  EXPECT_NO_THROW(table.resolve({mine.segment, size - 1}, 1));
  EXPECT_THROW(table.resolve({mine.segment, size - 1}, 2), ProtocolError);
  EXPECT_THROW(table.resolve({mine.segment, ~std::uint64_t{0}}, 2), ProtocolError);
  EXPECT_THROW(table.resolve({mine.segment, 8}, ~std::size_t{0}), ProtocolError);
  EXPECT_THROW(table.resolve({mine.segment + 1, 0}, 1), ProtocolError);
  EXPECT_THROW(table.resolve({}, 1), ProtocolError);
}

TEST_F(Registered, ADroppedPartGivesItsPagesBackAndLeavesTheOthers) {
  const SharedRef first = ranks[0].table->find(bytes_of(ranks[0]), 1);
  *bytes_of(ranks[0]) = std::byte{1};
  *bytes_of(ranks[1]) = std::byte{2};
  ranks[0].memory.reset();
  EXPECT_EQ(*ranks[1].table->resolve(first, 1), std::byte{0});  // the page is gone; what is read is a new one
  EXPECT_EQ(*bytes_of(ranks[1]), std::byte{2});
}

TEST_F(Registered, IsForgottenWhenAllHaveDroppedIt) {
  RegisteredMemory copy = *ranks[0].memory;
  ranks[0].memory.reset();
  ranks[1].memory.reset();
  EXPECT_FALSE(ranks[1].table->empty());  // the copy counts
  copy = {};
  EXPECT_TRUE(ranks[0].table->empty());
  // The other rank's table looks again when it next changes.
  const std::size_t more[] = {1, 1};
  const auto segment = Segment::create(RegisteredTable::segment_bytes(more));
  std::weak_ptr<Segment> old = ranks[1].segment;
  ranks[1].segment.reset();
  const RegisteredMemory next = ranks[1].table->add(segment, more, 1);
  EXPECT_TRUE(old.expired());
}

}  // namespace
}  // namespace maniple
