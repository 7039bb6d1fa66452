// A user's program: sums the ranks of a group. Usage: consumer INIT_METHOD [BACKEND]
#include <maniple/comm.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

int main(int count, char** arguments) try {
  maniple::InitOptions options;
  options.init_method = arguments[1];
  if (const char* ranks = std::getenv("WORLD_SIZE")) options.world_size = std::atoi(ranks);
  if (count > 2) options.backend = arguments[2];
  options.init_timeout = std::chrono::seconds(60);
  const auto world = maniple::init(options);
  int sum = world->rank() + 1;
  world->all_reduce(maniple::buffer_of(sum));
  std::printf("rank %d of %d over %s: %d\n", world->rank(), world->size(), world->backend().c_str(), sum);
  return sum == world->size() * (world->size() + 1) / 2 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
