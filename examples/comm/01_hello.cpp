// Initialises the world and prints a greeting on every rank; rank 0 reports when all ranks have done so.
//
//   build/bin/maniple run -n 4 build/bin/examples/comm/01_hello
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <string>

#include <maniple/comm.h>

int main() try {
  const auto world = maniple::init();  // env://: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
  const maniple::Topology& topology = world->topology();

  std::printf("hello from rank %d of %d: process %d on %s, local rank %d of %d, transport %s\n", world->rank(),
              world->size(), static_cast<int>(::getpid()), topology.members[world->rank()].host.c_str(),
              topology.local_rank(), topology.local_size(), std::string(world->transport()).c_str());
  std::fflush(stdout);
  world->barrier();
  if (world->rank() == 0) std::printf("all %d are here\n", world->size());
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
