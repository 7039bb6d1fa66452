// spawn in a program that is not position-independent.
#include "launch/spawn/spawn_fixture.h"

#include <maniple/comm.h>

namespace maniple {
namespace {

void sum_ranks(int rank, const std::string& text) {
  require(text == "text", "argument");
  auto world = init();
  int sum = rank;
  world->all_reduce(buffer_of(sum));
  require(sum == 3, "sum of ranks");
}

TEST_F(SpawnTest, AtAFixedAddress) {
  EXPECT_LT(reinterpret_cast<std::uintptr_t>(&sum_ranks), std::uintptr_t{1} << 32)
      << "this program is position-independent";
  spawn(sum_ranks, {.nprocs = 3}, "text");
  EXPECT_EQ(spawn_error([](int) { throw std::runtime_error("seen"); }, SpawnOptions{}).text(), "seen");
}

}  // namespace
}  // namespace maniple
