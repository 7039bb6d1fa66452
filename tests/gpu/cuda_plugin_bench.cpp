// Prints how long all_reduce of float32 takes through the plugin cuda: cuda_plugin_bench RANKS [WORD]. WORD is printed on every line.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "gpu/cases.h"
#include "gpu/device_ranks.h"

namespace maniple::device_test {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void measure(Rank& rank, DevicePlugin& plugin, const Memory& memory, Operation operation, const char* word) {
  const auto stream = static_cast<cudaStream_t>(rank.runtime().make_stream(0));
  operation.stream = stream;
  for (const bool registered : {true, false}) {
    operation.in = operation.out = memory.data(registered);
    for (const std::size_t bytes : {4u, 65536u, 1u << 20, 64u << 20, 256u << 20}) {
      operation.count = bytes / 4;
      const int turns = bytes > (8u << 20) ? 10 : 200;
      for (int i = 0; i < 3; ++i) plugin.enqueue(operation);
      ::cudaStreamSynchronize(stream);
      std::vector<double> single;
      for (int i = 0; i < 9; ++i) {
        rank.barrier();
        const auto start = Clock::now();
        plugin.enqueue(operation);
        ::cudaStreamSynchronize(stream);
        single.push_back(seconds_since(start));
      }
      rank.barrier();
      const auto start = Clock::now();
      for (int i = 0; i < turns; ++i) plugin.enqueue(operation);
      const double enqueued = seconds_since(start) / turns;
      require(::cudaStreamSynchronize(stream) == cudaSuccess, "cudaStreamSynchronize failed");
      const double each = seconds_since(start) / turns;
      std::sort(single.begin(), single.end());
      if (rank.rank() == 0) {
        std::printf("%-4s n=%d %-10s %9zu B: %8.1f us alone %8.1f us back to back %6.1f us to enqueue %7.1f GB/s\n",
                    word, rank.size(), registered ? "registered" : "ordinary", bytes, single[4] * 1e6, each * 1e6,
                    enqueued * 1e6, static_cast<double>(bytes) / each / 1e9);
        std::fflush(stdout);
      }
      rank.barrier();
    }
  }
}

}  // namespace
}  // namespace maniple::device_test

int main(int argc, char** argv) {
  using namespace maniple;
  using namespace maniple::device_test;
  const char* const word = argc > 2 ? argv[2] : "";
  const std::string failure = run_ranks(argc > 1 ? std::atoi(argv[1]) : 2, 60, [word](Rank& rank) {
    const auto plugin = rank.make();
    const Memory memory(rank, *plugin, std::size_t{256} << 20);
    ::cudaMemset(memory.data(false), 0, memory.size());
    ::cudaDeviceSynchronize();
    Operation operation;
    operation.op = Op::all_reduce;
    operation.dtype = DType::float32;
    measure(rank, *plugin, memory, operation, word);
  });
  if (!failure.empty()) std::fprintf(stderr, "%s\n", failure.c_str());
  return failure.empty() ? 0 : 1;
}
