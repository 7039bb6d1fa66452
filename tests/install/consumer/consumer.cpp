// A user's program: sums the ranks of a group that meets in a file.
#include <maniple/comm.h>

#include <cstdio>
#include <cstdlib>

int main(int, char** arguments) {
  maniple::JoinOptions options;
  options.init_method = arguments[1];
  options.world_size = std::atoi(std::getenv("WORLD_SIZE"));
  options.join_timeout = std::chrono::seconds(60);
  const auto world = maniple::join(options);
  int sum = world->rank() + 1;
  world->all_reduce(maniple::buffer_of(sum));
  std::printf("rank %d of %d: %d\n", world->rank(), world->size(), sum);
  return sum == world->size() * (world->size() + 1) / 2 ? 0 : 1;
}
