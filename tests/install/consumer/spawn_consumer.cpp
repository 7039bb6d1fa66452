// A user's program: two of its functions as ranks. The first rank fails, and main learns it.
#include <maniple/comm.h>
#include <maniple/launch/spawn.h>

#include <cstdio>

void sum_and_fail(int rank, int start) {
  const auto world = maniple::init();
  int sum = start + rank;
  world->all_reduce(maniple::buffer_of(sum));
  if (sum != 2 * start + 1) throw maniple::Unsupported("the sum is wrong");
  if (rank == 0) throw maniple::InvalidArgument("on purpose");
}

int main() try {
  maniple::spawn(sum_and_fail, {.nprocs = 2}, 20);
  return 1;
} catch (const maniple::SpawnError& error) {
  std::printf("spawned: %s\n", error.what());
  return 0;
}
