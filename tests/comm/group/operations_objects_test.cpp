// Objects: bytes of any length, different on every rank.
#include <maniple/comm/error.h>

#include "comm/group/matrix.h"

namespace maniple::harness {
namespace {

class Objects : public Operations {};
INSTANTIATE_TEST_SUITE_P(Every, Objects, testing::ValuesIn(every_place()), name_of);

// Rank by rank: empty, one byte, zeros inside, and a long one that no small buffer holds.
std::string object_of(int rank, int round) {
  switch ((rank + round) % 4) {
    case 0: return "";
    case 1: return std::string(1, static_cast<char>('a' + rank));
    case 2: return std::string("zero\0inside", 11) + std::to_string(rank);
    default: return std::string(30'000 + 1000 * rank, static_cast<char>('A' + rank));
  }
}

std::vector<std::string> all_objects(int size, int round) {
  std::vector<std::string> objects;
  for (int rank = 0; rank < size; ++rank) objects.push_back(object_of(rank, round));
  return objects;
}

TEST_P(Objects, Broadcast) {
  run([](Rank& r) {
    for (int root = 0; root < r.size; ++root) {
      for (int round = 0; round < 4; ++round) {
        const std::string mine = r.rank == root ? object_of(root, round) : "ignored";
        EXPECT_EQ(r.world->broadcast_object(mine, root), object_of(root, round));
      }
    }
  });
}

TEST_P(Objects, AllGather) {
  run([](Rank& r) {
    for (int round = 0; round < 4; ++round) {
      EXPECT_EQ(r.world->all_gather_objects(object_of(r.rank, round)), all_objects(r.size, round));
    }
  });
}

TEST_P(Objects, GatherGivesTheRootAllAndOthersNothing) {
  run([](Rank& r) {
    for (int root = 0; root < r.size; ++root) {
      const auto gathered = r.world->gather_objects(object_of(r.rank, root), root);
      EXPECT_EQ(gathered, r.rank == root ? all_objects(r.size, root) : std::vector<std::string>{});
    }
  });
}

TEST_P(Objects, Scatter) {
  run([](Rank& r) {
    for (int root = 0; root < r.size; ++root) {
      const auto objects = r.rank == root ? all_objects(r.size, root) : std::vector<std::string>{};
      EXPECT_EQ(r.world->scatter_objects(objects, root), object_of(r.rank, root));
    }
  });
}

TEST_P(Objects, AllEmpty) {
  run([](Rank& r) {
    EXPECT_EQ(r.world->broadcast_object("", 0), "");
    EXPECT_EQ(r.world->all_gather_objects(""), std::vector<std::string>(r.size));
    EXPECT_EQ(r.world->scatter_objects(std::vector<std::string>(r.size), 0), "");
  });
}

TEST_P(Objects, ScatterOfAWrongNumberLeavesTheGroupUsable) {
  run([](Rank& r) {
    if (r.rank == 0) {
      EXPECT_THROW(r.world->scatter_objects(std::vector<std::string>(r.size + 1), 0), InvalidArgument);
    }
    EXPECT_EQ(r.world->scatter_objects(r.rank == 0 ? all_objects(r.size, 1) : std::vector<std::string>{}, 0),
              object_of(r.rank, 1));
  });
}

}  // namespace
}  // namespace maniple::harness
