// The plugin cuda against the reduce kernels of the host: every operation, dtype and reduce op, on one GPU that ranks
// share.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sched.h>
#include <unistd.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstring>
#include <future>

#include "plugins/cases.h"
#include "plugins/device_ranks.h"

namespace maniple::device_test {
namespace {

constexpr std::size_t kSmall = std::size_t{8} << 20;

/// A plugin, memory and a stream.
struct Place {
  explicit Place(Rank& self, std::size_t bytes = kSmall)
      : rank(self), plugin(self.make()), memory(self, *plugin, bytes), stream(self.runtime().make_stream(0).handle) {}
  ~Place() { rank.runtime().free_stream({0, stream}); }
  void run(const Case& test) { run_case(rank, *plugin, memory, test, stream, ++seed); }

  Rank& rank;
  std::unique_ptr<DevicePlugin> plugin;
  Memory memory;
  void* stream;
  std::uint64_t seed = 0;
};

/// Counts of ranks that differ, some zero.
std::vector<std::size_t> uneven(int size, std::size_t scale) {
  std::vector<std::size_t> counts;
  for (int i = 0; i < size; ++i) counts.push_back(i % 3 == 1 ? 0 : scale * static_cast<std::size_t>(i + 1) + 3);
  return counts;
}
std::vector<std::size_t> uneven_pairs(int size, std::size_t scale) {
  std::vector<std::size_t> counts;
  for (int i = 0; i < size * size; ++i) counts.push_back(i % 4 == 2 ? 0 : scale * static_cast<std::size_t>(i % 7) + 1);
  return counts;
}

class Ranks : public testing::TestWithParam<int> {
 protected:
  static void in_ranks(const std::function<void(Rank&)>& body, double seconds = 120) {
    EXPECT_EQ(run_ranks(GetParam(), seconds, body), "");
  }
};
INSTANTIATE_TEST_SUITE_P(OneGpu, Ranks, testing::Values(1, 2, 3, 4, 8), testing::PrintToStringParamName());

TEST_P(Ranks, ReduceEveryDtypeWithEveryOp) {
  in_ranks([](Rank& rank) {
    Place place(rank);
    for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
      for (int kind = 0; kind < ReduceOp::kKindCount; ++kind) {
        Case test;
        test.dtype = static_cast<DType>(dtype);
        if (!is_reducible(test.dtype, static_cast<ReduceOp::Kind>(kind))) continue;
        test.reduce = kind == ReduceOp::premul_sum ? ReduceOp::premultiplied(kind % 2 == 0 ? -3 : 5)
                                                   : ReduceOp(static_cast<ReduceOp::Kind>(kind));
        for (const bool registered : {false, true}) {
          test.registered = registered;
          test.op = Op::all_reduce;
          test.counts = {1003};
          test.in_place = kind % 2 == 0;
          place.run(test);
          test.op = Op::reduce_scatter;
          test.counts = uneven(rank.size(), 37);
          test.in_place = kind % 2 == 1;
          place.run(test);
        }
        test.registered = false;
        test.op = Op::reduce;
        test.counts = {77};
        test.root = rank.size() - 1;
        place.run(test);
      }
    }
  });
}

TEST_P(Ranks, CountsAndPlaces) {
  in_ranks([](Rank& rank) {
    Place place(rank);
    const int size = rank.size();
    for (const Op op : {Op::all_reduce, Op::broadcast, Op::reduce, Op::gather, Op::all_gather, Op::scatter,
                        Op::reduce_scatter, Op::all_to_all, Op::barrier}) {
      for (const bool registered : {false, true}) {
        for (const bool in_place : {false, true}) {
          if (op == Op::all_to_all && in_place) continue;
          for (const std::size_t count : {0, 1, 7, 4099, 60000}) {
            Case test{.op = op, .counts = {count}, .root = static_cast<int>(count) % size};
            test.registered = registered;
            test.in_place = in_place;
            place.run(test);
          }
          Case test{.op = op, .dtype = DType::bfloat16, .reduce = ReduceOp::avg, .counts = {513}, .root = size / 2};
          test.registered = registered;
          test.in_place = in_place;
          if (op == Op::all_to_all) {
            test.counts = size == 1 ? std::vector<std::size_t>{5} : uneven_pairs(size, 1001);
          } else if (op == Op::gather || op == Op::all_gather || op == Op::scatter || op == Op::reduce_scatter) {
            test.counts = size == 1 ? std::vector<std::size_t>{5} : uneven(size, 999);
          }
          place.run(test);
          if (op == Op::all_to_all) continue;
          for (const std::size_t shift : {1, 2, 4, 8}) {  // of addresses
            Case odd{.op = op, .dtype = DType::float32, .counts = {1001}, .root = 0};
            odd.registered = registered;
            odd.in_place = in_place;
            odd.shift = shift;
            place.run(odd);
          }
        }
        if (op == Op::gather || op == Op::all_gather || op == Op::scatter || op == Op::reduce_scatter) {
          Case test{.op = op, .counts = {5000}, .root = size - 1};
          test.registered = registered;
          test.overlapping = true;
          place.run(test);
        }
      }
    }
  });
}

TEST_P(Ranks, StagesOfAHierarchy) {
  in_ranks([](Rank& rank) {
    Place place(rank);
    Case test{.dtype = DType::int32, .reduce = ReduceOp::avg, .counts = {1001}};
    test.ranks = 3 * rank.size();
    place.run(test);
    test.last_stage = false;
    place.run(test);
    test.reduce = ReduceOp::premultiplied(7);
    place.run(test);
    test.first_stage = false;
    place.run(test);
  });
}

TEST_P(Ranks, LargerThanTheSlot) {
  in_ranks([](Rank& rank) {
    Place place(rank, std::size_t{640} << 20);
    const int size = rank.size();
    for (const bool registered : {false, true}) {
      Case test{.counts = {std::size_t{18} << 20}};  // 72 MiB
      test.registered = registered;
      test.in_place = true;
      place.run(test);
      test = {.op = Op::all_to_all, .dtype = DType::int16, .counts = uneven_pairs(size, 700001)};
      if (size == 1) test.counts = {700001};
      test.registered = registered;
      place.run(test);
      test = {.op = Op::reduce_scatter, .dtype = DType::float16, .counts = uneven(size, 1500001)};
      test.registered = registered;
      if (size == 1) test.counts = {1500001};
      place.run(test);
      test.op = Op::all_gather;
      place.run(test);
    }
  });
}

/// The driver's current context of the calling thread.
CUcontext current_context() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  ::cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &found, 12000, cudaEnableDefault, &result);
#else
  ::cudaGetDriverEntryPoint("cuCtxGetCurrent", &found, cudaEnableDefault, &result);
#endif
  require(found != nullptr, "the driver has no cuCtxGetCurrent");
  CUcontext context = nullptr;
  require(reinterpret_cast<decltype(&::cuCtxGetCurrent)>(found)(&context) == CUDA_SUCCESS, "cuCtxGetCurrent failed");
  return context;
}

// Selecting a device and selecting the previous one again would create a context on GPU 0 in every rank of every other
// GPU.
TEST(Cuda, TheRuntimeLeavesAThreadWithoutAContextWithoutOne) {
  EXPECT_EQ(run_ranks(1, 60,
                      [](Rank& rank) {
                        DeviceRuntime& runtime = rank.runtime();
                        const auto plugin = rank.make();
                        std::async(std::launch::async,
                                   [&] {  // a thread that CUDA has not seen
                                     const auto expect_none = [](const char* call) {
                                       require(current_context() == nullptr, std::string(call) + " left a context");
                                     };
                                     const DeviceStream stream{0, nullptr};
                                     const DeviceEvent event = runtime.make_event(0);
                                     std::byte* const pinned = runtime.make_pinned(0, 64);
                                     std::byte* const memory = runtime.make_memory(0, 64);
                                     expect_none("making an event and memory");
                                     require(!runtime.is_capturing(stream), "it captures");
                                     std::memset(pinned, 1, 64);
                                     runtime.copy(memory, pinned, 64, stream);
                                     runtime.wait_for_bits(stream, reinterpret_cast<std::uint32_t*>(pinned), 1);
                                     runtime.record(event, stream);
                                     runtime.wait(stream, event);
                                     expect_none("enqueueing");
                                     while (!runtime.reached(event)) ::sched_yield();
                                     plugin->fault();
                                     expect_none("polling");
                                     runtime.free_memory(0, memory);
                                     runtime.free_pinned(0, pinned);
                                     runtime.free_event(event);
                                     expect_none("freeing");
                                   })
                            .get();
                      }),
            "");
}

TEST(Cuda, CountsBeyondFourGigabytes) {
  EXPECT_EQ(run_ranks(2, 120,
                      [](Rank& rank) {
                        const auto plugin = rank.make();
                        void* const stream = rank.runtime().make_stream(0).handle;
                        const std::size_t bytes = (std::size_t{1} << 32) + 4097;
                        void* memory = nullptr;
                        require(::cudaMalloc(&memory, bytes) == cudaSuccess, "cudaMalloc failed");
                        require(::cudaMemset(memory, rank.rank() + 1, bytes) == cudaSuccess, "cudaMemset failed");
                        ::cudaDeviceSynchronize();
                        Operation operation;
                        operation.op = Op::all_reduce;
                        operation.dtype = DType::int8;
                        operation.count = bytes;
                        operation.in = operation.out = static_cast<std::byte*>(memory);
                        operation.stream = stream;
                        plugin->enqueue(operation);
                        for (const std::size_t at : {std::size_t{0}, bytes / 2 + 1, bytes - 3}) {
                          const Bytes got = download(rank, operation.out + at, 3, stream);
                          require(got == Bytes(3, std::byte{3}), "wrong at " + std::to_string(at));
                        }
                      }),
            "");
}

// The device maps more than was asked for. What lies behind the end is ordinary memory, on the root and on those that
// receive.
TEST(Cuda, MemoryBehindRegisteredMemoryIsOrdinary) {
  EXPECT_EQ(run_ranks(2, 60,
                      [](Rank& rank) {
                        Place place(rank);
                        const RegisteredMemory memory = rank.allocate(*place.plugin, 1 << 20);
                        auto* const behind = static_cast<std::byte*>(memory.data()) + memory.size();
                        upload(rank, behind, Bytes(1000, static_cast<std::byte>(rank.rank() + 1)), place.stream);
                        Operation operation;
                        operation.op = Op::broadcast;
                        operation.dtype = DType::uint8;
                        operation.count = 1000;
                        operation.root = 1;
                        operation.in = operation.out = behind;
                        operation.stream = place.stream;
                        place.plugin->enqueue(operation);
                        const Bytes got = download(rank, behind, 1000, place.stream);
                        require(place.plugin->fault().kind == DeviceFault::Kind::none, "a mismatch");
                        require(got == Bytes(1000, std::byte{2}), "not the bytes of the root");
                      }),
            "");
}

TEST(Cuda, ASlowProducerIsWaitedForAndStreamsFollowEachOther) {
  EXPECT_EQ(run_ranks(2, 60,
                      [](Rank& rank) {
                        Place place(rank);
                        void* const other = rank.runtime().make_stream(0).handle;
                        const std::size_t count = 100000;
                        const auto pause = [](void*) { ::usleep(30000); };  // sleep: the producer is to be slow
                        auto* const data = place.memory.data(false);
                        const Bytes late = [&] {
                          Bytes all(count * 4);
                          const int one = rank.rank() + 1;
                          for (std::size_t i = 0; i < count; ++i) std::memcpy(all.data() + 4 * i, &one, 4);
                          return all;
                        }();
                        for (int turn = 0; turn < 3; ++turn) {
                          void* const stream = turn % 2 == 0 ? place.stream : other;
                          if (rank.rank() == turn % 2) {
                            ::cudaLaunchHostFunc(static_cast<cudaStream_t>(stream), pause, nullptr);
                          }
                          rank.runtime().copy(data, late.data(), late.size(), {0, stream});
                          Operation operation;
                          operation.op = Op::all_reduce;
                          operation.dtype = DType::int32;
                          operation.count = count;
                          operation.in = operation.out = data;
                          operation.stream = stream;
                          place.plugin->enqueue(operation);
                          operation.stream =
                              stream == other ? place.stream : other;  // after the first, without a wait in the test
                          place.plugin->enqueue(operation);
                          const Bytes got = download(rank, data, 4, operation.stream);
                          int value = 0;
                          std::memcpy(&value, got.data(), 4);
                          require(value == 6, "turn " + std::to_string(turn) + ": " + std::to_string(value));
                          rank.barrier();
                        }
                        rank.runtime().free_stream({0, other});
                      }),
            "");
}

TEST(Cuda, GraphsReplayOperations) {
  EXPECT_EQ(run_ranks(3, 60,
                      [](Rank& rank) {
                        Place place(rank);
                        const std::size_t count = 5000;
                        auto* const plain = reinterpret_cast<std::byte*>(place.memory.data(false));
                        auto* const shared = reinterpret_cast<std::byte*>(place.memory.data(true));
                        Operation first;
                        first.op = Op::all_reduce;
                        first.dtype = DType::int32;
                        first.count = count;
                        first.in = plain;
                        first.out = plain + (1 << 20);
                        first.stream = place.stream;
                        Operation second = first;
                        second.op = Op::all_gather;
                        second.in = first.out;
                        second.out = plain + (2 << 20);
                        second.parts = Parts(count, rank.size());
                        Operation third = first;
                        third.in = third.out = shared;
                        const auto stream = static_cast<cudaStream_t>(place.stream);
                        cudaGraph_t graph = nullptr;
                        require(::cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess,
                                "begin");
                        require(rank.runtime().is_capturing({0, stream}), "it does not capture");
                        place.plugin->enqueue(first);
                        place.plugin->enqueue(second);
                        place.plugin->enqueue(third);
                        require(::cudaStreamEndCapture(stream, &graph) == cudaSuccess, "the capture failed");
                        cudaGraphExec_t ready = nullptr;
                        require(::cudaGraphInstantiateWithFlags(&ready, graph, 0) == cudaSuccess,
                                "cudaGraphInstantiateWithFlags failed");
                        std::vector<int> input(count);
                        for (int turn = 0; turn < 100; ++turn) {
                          std::fill(input.begin(), input.end(), turn * 10 + rank.rank());
                          rank.runtime().copy(plain, input.data(), count * 4, {0, stream});
                          rank.runtime().copy(shared, input.data(), count * 4, {0, stream});
                          require(::cudaGraphLaunch(ready, stream) == cudaSuccess, "cudaGraphLaunch failed");
                          if (turn % 10 != 9) {
                            finish(rank, stream);  // `input` is read again
                            continue;
                          }
                          place.plugin->enqueue(third);  // an ordinary call between graphs
                          const int sum = turn * 30 + 3;
                          const auto is = [&](const std::byte* at, int value) {
                            const Bytes got = download(rank, at, 4, stream);
                            int found = 0;
                            std::memcpy(&found, got.data(), 4);
                            require(found == value, "turn " + std::to_string(turn) + ": " + std::to_string(found) +
                                                        " instead of " + std::to_string(value));
                          };
                          is(first.out + 4 * (count - 1), sum);
                          is(second.out + 4 * (3 * count - 1), sum);
                          is(shared + 4 * (count - 1), 3 * sum);
                        }
                        ::cudaGraphExecDestroy(ready);
                        ::cudaGraphDestroy(graph);
                      }),
            "");
}

}  // namespace
}  // namespace maniple::device_test
