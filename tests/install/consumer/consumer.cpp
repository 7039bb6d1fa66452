// A user's program: sums the ranks of a group, and makes a mistake. Usage: consumer INIT_METHOD [BACKEND]
#include <maniple/comm.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#if MANIPLE_VERSION < MANIPLE_MAKE_VERSION(0, 1, 0)
#error "this version is not known"
#endif

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
  if (sum != world->size() * (world->size() + 1) / 2 || std::strcmp(maniple::version(), MANIPLE_VERSION_STRING) != 0)
    return 1;
  try {
    world->broadcast(maniple::buffer_of(sum), world->size());
  } catch (const maniple::InvalidArgument&) {  // an error of the library is caught by its class
    return 0;
  }
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
