// The last rank dies silently in the middle of the job. The other ranks get an error at once that names the dead rank
// and lists their latest operations, as a log should.
//
//   build/bin/maniple run -n 3 build/bin/examples/comm/06_lost_rank
#include <unistd.h>

#include <cstdio>
#include <exception>

#include <maniple/comm.h>

int main() try {
  const auto world = maniple::init();
  const int victim = world->size() - 1;
  float value = 1;
  world->all_reduce(maniple::buffer_of(value));
  if (world->rank() == victim) ::_exit(0);  // without destructors or leave notice: the other ranks see a crash

  try {
    world->all_reduce(maniple::buffer_of(value));
  } catch (const maniple::PeerLost& lost) {
    std::printf("rank %d lost rank %d: %s\n", world->rank(), lost.rank(), lost.what());
    for (const auto& line : world->recent_operations()) std::printf("rank %d did: %s\n", world->rank(), line.c_str());
    return lost.rank() == victim ? 0 : 1;
  } catch (const maniple::Aborted& aborted) {  // another survivor noticed first
    std::printf("rank %d got: %s\n", world->rank(), aborted.what());
    return 0;
  }
  std::fprintf(stderr, "rank %d: the loss of rank %d went unnoticed\n", world->rank(), victim);
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
