// What a scheduler starts: joins by what the scheduler has set, adds up the ranks, says who it is.
#include <cstdio>
#include <exception>

#include <maniple/comm.h>

int main() try {
  maniple::InitOptions options;
  options.timeout = std::chrono::seconds(120);
  auto world = maniple::init(options);
  int sum = world->rank() + 1;
  world->all_reduce(maniple::buffer_of(sum));
  world->barrier();
  std::printf("rank %d of %d: sum %d\n", world->rank(), world->size(), sum);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
