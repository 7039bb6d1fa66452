#include "comm/base/rank_arithmetic.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>

namespace maniple {
namespace {

TEST(RingRank, WrapsBothWays) {
  EXPECT_EQ(ring_rank(4, 1, 5), 0);
  EXPECT_EQ(ring_rank(0, -1, 5), 4);
  EXPECT_EQ(ring_rank(2, -12, 5), 0);
  EXPECT_EQ(ring_rank(0, 7, 1), 0);
}

TEST(BinomialTree, ParentsAndChildrenAgreeAndReachEveryone) {
  for (int size = 1; size <= 33; ++size) {
    for (int root = 0; root < size; root += 1 + size / 4) {
      int children = 0;
      for (int rank = 0; rank < size; ++rank) {
        const BinomialTree tree = binomial_tree(rank, root, size);
        EXPECT_EQ(tree.parent < 0, rank == root) << size << " " << root << " " << rank;
        for (const int child : tree.children) EXPECT_EQ(binomial_tree(child, root, size).parent, rank);
        children += static_cast<int>(tree.children.size());
      }
      EXPECT_EQ(children, size - 1);
    }
  }
}

// What rank-ordered reduction relies on: own rank, then the children's subtrees in turn, counts upwards without a gap.
std::vector<int> in_order(int rank, int root, int size) {
  std::vector<int> ranks{rank};
  for (const int child : binomial_tree(rank, root, size).children) {
    const std::vector<int> below = in_order(child, root, size);
    ranks.insert(ranks.end(), below.begin(), below.end());
  }
  return ranks;
}

TEST(BinomialTree, SubtreesAreConsecutiveRanksInOrder) {
  for (int size = 1; size <= 17; ++size) {
    const int root = size / 2;
    std::vector<int> expected(static_cast<std::size_t>(size));
    for (int i = 0; i < size; ++i) expected[static_cast<std::size_t>(i)] = (root + i) % size;
    EXPECT_EQ(in_order(root, root, size), expected);
  }
}

TEST(DoublingDistances, ConnectAllRanks) {
  EXPECT_TRUE(doubling_distances(1).empty());
  EXPECT_EQ(doubling_distances(9), (std::vector<int>{1, 2, 4, 8}));
  for (int size = 1; size <= 40; ++size) {  // whoever is reached after all steps has heard of everyone
    std::set<int> reached{0};
    for (const int distance : doubling_distances(size)) {
      for (const int rank : std::set<int>(reached)) reached.insert((rank + distance) % size);
    }
    EXPECT_EQ(reached.size(), static_cast<std::size_t>(size));
  }
}

TEST(SliceOf, CoversEverythingOnceAndEvenly) {
  for (const std::size_t total : {0, 1, 5, 8, 1000, 1003}) {
    for (int slices = 1; slices <= 9; ++slices) {
      std::size_t next = 0;
      for (int i = 0; i < slices; ++i) {
        const Slice slice = slice_of(total, slices, i);
        EXPECT_EQ(slice.offset, next);
        EXPECT_LE(slice_of(total, slices, 0).count - slice.count, 1U);
        next += slice.count;
      }
      EXPECT_EQ(next, total);
    }
  }
}

}  // namespace
}  // namespace maniple
