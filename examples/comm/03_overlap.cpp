// Overlaps communication with computation, through asynchronous calls and their `Work`.
//
//   build/bin/maniple run -n 2 build/bin/examples/comm/03_overlap
#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

#include <maniple/comm.h>

int main() try {
  const auto world = maniple::init();

  // Four "gradients", ready one after the other. Each is averaged while the next is computed.
  constexpr int kLayers = 4;
  std::vector<std::vector<float>> gradients(kLayers, std::vector<float>(1 << 20));
  std::vector<maniple::Work> pending;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (std::size_t i = 0; i < gradients[layer].size(); ++i) {
      gradients[layer][i] = std::sqrt(static_cast<float>(layer + 1)) * static_cast<float>(world->rank() + 1);
    }
    pending.push_back(
        world->all_reduce(maniple::buffer_of(gradients[layer]), maniple::ReduceOp::avg, {.async_op = true}));
  }
  for (const maniple::Work& work : pending) work.wait();  // throws the operation's error, if any

  // The average of 1 .. n is (n + 1) / 2.
  const float expected = std::sqrt(4.0F) * static_cast<float>(world->size() + 1) / 2;
  const bool right = std::abs(gradients[3][0] - expected) < 1e-5F;
  std::printf("rank %d: last layer %g, expected %g\n", world->rank(), gradients[3][0], expected);
  return right ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
