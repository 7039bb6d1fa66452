// Operations captured into CUDA graphs, through a ProcessGroup: by the engines that can, and refused by name where they
// go through host memory.
#include <cuda_runtime_api.h>
#include <unistd.h>
#include <gtest/gtest.h>

#include <csignal>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "comm/backend/plugin/load.h"
#include "comm/backend/work_state.h"
#include "fault/expect_error.h"
#include "harness/run_ranks.h"

namespace maniple::graph_test {
namespace {

using harness::As;
using harness::catch_error;
using harness::Caught;
using harness::Rank;
using harness::run_ranks;

constexpr std::size_t kCount = 5000;

void check(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + ::cudaGetErrorString(code));
}
#define CHECK(call) check(call, #call)

cudaStream_t captured_stream = nullptr;  // that Work::wait takes for the current one

/// Device memory and a stream.
struct Place {
  Place() {
    CHECK(::cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    captured_stream = stream;
    current_stream = [](int) -> void* { return captured_stream; };
  }
  ~Place() {
    current_stream = nullptr;
    for (void* memory : all) ::cudaFree(memory);
    ::cudaStreamDestroy(stream);
  }
  Buffer make() {
    void* memory = nullptr;
    CHECK(::cudaMalloc(&memory, kCount * sizeof(int)));
    all.push_back(memory);
    return {memory, kCount, DType::int32, Device::cuda(0)};
  }
  void fill(const Buffer& buffer, int value) {
    const std::vector<int> values(kCount, value);
    CHECK(::cudaMemcpyAsync(buffer.data, values.data(), buffer.bytes(), cudaMemcpyDefault, stream));
    CHECK(::cudaStreamSynchronize(stream));
  }
  void expect(const Buffer& buffer, int value) {
    std::vector<int> values(kCount);
    CHECK(::cudaMemcpyAsync(values.data(), buffer.data, buffer.bytes(), cudaMemcpyDefault, stream));
    CHECK(::cudaStreamSynchronize(stream));
    EXPECT_EQ(values, std::vector<int>(kCount, value));
  }
  cudaStream_t stream = nullptr;
  std::vector<void*> all;
};

/// A captured graph, ready to be launched.
struct Graph {
  explicit Graph(cudaStream_t stream) {
    CHECK(::cudaStreamEndCapture(stream, &graph));
    CHECK(::cudaGraphInstantiateWithFlags(&ready, graph, 0));
  }
  ~Graph() {
    ::cudaGraphExecDestroy(ready);
    ::cudaGraphDestroy(graph);
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
};

class Graphs : public testing::TestWithParam<std::tuple<const char*, int>> {};
INSTANTIATE_TEST_SUITE_P(Backend, Graphs, testing::Combine(testing::Values("cuda", "nccl"), testing::Values(1, 2)),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param)) + std::to_string(std::get<1>(test.param));
                         });

TEST_P(Graphs, ReplayOperationsWithOtherData) {
  const auto [backend, n] = GetParam();
  run_ranks({.n = n, .as = As::processes, .backend = backend}, [](Rank& r) {
    Place place;
    const Buffer source = place.make();
    const Buffer first = place.make();
    const Buffer second = place.make();
    const auto copy = [&](const Buffer& to, const Buffer& from) {
      CHECK(::cudaMemcpyAsync(to.data, from.data, to.bytes(), cudaMemcpyDeviceToDevice, place.stream));
    };
    place.fill(first, 1);
    r.world->all_reduce(first, ReduceOp::sum, {.stream = place.stream}).synchronize();  // NCCL connects
    r.phase("connected");
    for (int capture = 0; capture < 2; ++capture) {  // an event of the first means nothing in the second
      CHECK(::cudaStreamBeginCapture(place.stream, cudaStreamCaptureModeGlobal));
      copy(first, source);
      r.world->all_reduce(first, ReduceOp::sum, {.stream = place.stream});
      copy(second, first);
      // On a stream of the group's own, as DDP does it.
      r.world->all_reduce(second, ReduceOp::sum, {.async_op = true, .stream = place.stream}).wait();
      const Graph graph(place.stream);
      for (int turn = 1; turn <= 3; ++turn) {
        place.fill(source, turn * (r.rank + 1));
        CHECK(::cudaGraphLaunch(graph.ready, place.stream));
        const int sum = turn * r.size * (r.size + 1) / 2;
        place.expect(first, sum);
        place.expect(second, sum * r.size);
        // An ordinary call between replays.
        r.world->all_reduce(first, ReduceOp::sum, {.stream = place.stream});
        place.expect(first, sum * r.size);
      }
    }
  });
}

TEST(Graph, IsRefusedWhereDataGoesThroughMemoryOfTheHost) {
  run_ranks({.n = 2, .as = As::processes, .backend = "native"}, [](Rank& r) {
    Place place;
    const Buffer data = place.make();
    place.fill(data, 1);
    CHECK(::cudaStreamBeginCapture(place.stream, cudaStreamCaptureModeGlobal));
    const Caught caught = catch_error([&] { r.world->all_reduce(data, ReduceOp::sum, {.stream = place.stream}); });
    EXPECT_TRUE(caught.is(ErrorKind::unsupported)) << caught;
    EXPECT_TRUE(harness::contains(caught.text, "cannot be captured into a CUDA graph")) << caught;
    cudaGraph_t graph = nullptr;
    CHECK(::cudaStreamEndCapture(place.stream, &graph));
    ::cudaGraphDestroy(graph);
    r.world->all_reduce(data, ReduceOp::sum, {.stream = place.stream});
    place.expect(data, 2);
  });
}

TEST(Graph, AReplayEndsWhenAnotherRankHasDied) {
  run_ranks({.n = 2, .as = As::processes, .backend = "cuda", .expect_dead = {1}}, [](Rank& r) {
    Place place;
    const Buffer data = place.make();
    place.fill(data, 1);
    r.world->all_reduce(data, ReduceOp::sum, {.stream = place.stream}).synchronize();
    CHECK(::cudaStreamBeginCapture(place.stream, cudaStreamCaptureModeGlobal));
    r.world->all_reduce(data, ReduceOp::sum, {.stream = place.stream});
    const Graph graph(place.stream);
    r.phase("captured");
    if (r.rank == 1) ::raise(SIGKILL);
    for (int turn = 0; turn < 3; ++turn) CHECK(::cudaGraphLaunch(graph.ready, place.stream));
    CHECK(::cudaStreamSynchronize(place.stream));
    const Caught caught = catch_error([&] { r.world->barrier(); });
    EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
    EXPECT_EQ(caught.lost_rank, 1) << caught;
  });
}

}  // namespace
}  // namespace maniple::graph_test
