#include "comm/call/operation.h"

#include <gtest/gtest.h>

#include <vector>

namespace maniple {
namespace {

TEST(Parts, Equal) {
  const Parts parts(5, 3);
  EXPECT_TRUE(parts.equal());
  EXPECT_EQ(parts.ranks(), 3);
  EXPECT_EQ(parts.total(), 15u);
  EXPECT_EQ(parts.largest(), 5u);
  EXPECT_EQ(parts.count(2), 5u);
  EXPECT_EQ(parts.offset(2), 10u);
  EXPECT_EQ(parts.hash(), 0u);
}

TEST(Parts, Uneven) {
  const std::vector<std::size_t> counts = {4, 0, 7, 1};
  const Parts parts(counts);
  EXPECT_FALSE(parts.equal());
  EXPECT_EQ(parts.ranks(), 4);
  EXPECT_EQ(parts.total(), 12u);
  EXPECT_EQ(parts.largest(), 7u);
  std::size_t offset = 0;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(parts.count(rank), counts[static_cast<std::size_t>(rank)]);
    EXPECT_EQ(parts.offset(rank), offset);
    offset += parts.count(rank);
  }
}

TEST(Parts, EmptyLists) {
  EXPECT_EQ(Parts().total(), 0u);
  EXPECT_EQ(Parts().ranks(), 0);
  const std::vector<std::size_t> zeros(3, 0);
  EXPECT_EQ(Parts(zeros).total(), 0u);
  EXPECT_EQ(Parts(zeros).largest(), 0u);
}

TEST(Parts, HashDistinguishesLists) {
  const auto hash = [](std::vector<std::size_t> counts) { return Parts(counts).hash(); };
  EXPECT_EQ(hash({1, 2, 3}), hash({1, 2, 3}));
  EXPECT_NE(hash({1, 2, 3}), hash({3, 2, 1}));
  EXPECT_NE(hash({1, 2, 3}), hash({1, 2, 4}));
  EXPECT_NE(hash({1, 2}), hash({1, 2, 0}));
  EXPECT_NE(hash({0, 0}), 0u) << "0 means equal parts";
}

}  // namespace
}  // namespace maniple
