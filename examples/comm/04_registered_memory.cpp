// Computes the same sum twice: on ordinary memory, and on registered memory. All ranks on the host map registered
// memory, so it is reduced in place, without a copy.
//
//   build/bin/maniple run -n 2 build/bin/examples/comm/04_registered_memory
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <span>
#include <vector>

#include <maniple/comm.h>

namespace {

constexpr std::size_t kCount = 4 << 20;  // 16 MiB of float32
constexpr int kRounds = 10;

/// The fastest of a few rounds, in milliseconds.
double best_ms(maniple::ProcessGroup& group, std::span<float> data) {
  double best = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    std::fill(data.begin(), data.end(), static_cast<float>(group.rank() + 1));
    group.barrier();
    const auto start = std::chrono::steady_clock::now();
    group.all_reduce(maniple::buffer_of(data));
    best = std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

}  // namespace

int main() try {
  const auto world = maniple::init();
  std::vector<float> ordinary(kCount);
  const maniple::RegisteredMemory memory = world->allocate(kCount * sizeof(float));
  const std::span<float> registered = memory.as<float>(kCount);

  const double ordinary_ms = best_ms(*world, ordinary);
  const double registered_ms = best_ms(*world, registered);
  if (world->rank() == 0) {
    std::printf("all_reduce of 16 MiB by %d ranks: ordinary %.2f ms, registered %.2f ms\n", world->size(), ordinary_ms,
                registered_ms);
  }
  const bool same = std::equal(ordinary.begin(), ordinary.end(), registered.begin());
  return same ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
