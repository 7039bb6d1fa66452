// The plugin cuda when ranks call different things, or when one is killed.
#include <cuda_runtime_api.h>
#include <unistd.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "gpu/cases.h"
#include "gpu/device_ranks.h"

namespace maniple::device_test {
namespace {

constexpr std::size_t kBytes = std::size_t{64} << 20;
constexpr int kCalls = 20;  // about a thousand commands fill a stream, and then enqueueing blocks

Operation all_reduce(std::byte* data, std::size_t count, void* stream, std::uint64_t seq) {
  Operation operation;
  operation.op = Op::all_reduce;
  operation.dtype = DType::float32;
  operation.count = count;
  operation.in = operation.out = data;
  operation.stream = stream;
  operation.seq = seq;
  return operation;
}

void expect_mismatch(DevicePlugin& plugin, std::uint64_t seq) {
  const Deadline limit = Deadline::after(std::chrono::seconds(10));
  while (plugin.fault().kind == DeviceFault::Kind::none) require(!limit.expired(), "no mismatch was reported");
  const DeviceFault fault = plugin.fault();
  require(fault.kind == DeviceFault::Kind::mismatch && fault.seq == seq, "another fault: " + fault.reason);
}

class Mismatches : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Memory, Mismatches, testing::Bool(),
                         [](const auto& test) { return std::string(test.param ? "Registered" : "Ordinary"); });

TEST_P(Mismatches, AreReportedAndMoveNothing) {
  const bool registered = GetParam();
  EXPECT_EQ(run_ranks(3, 60,
                      [registered](Rank& rank) {
                        const auto plugin = rank.make();
                        const Memory memory(rank, *plugin, kBytes);
                        void* const stream = rank.runtime().make_stream(0);
                        std::byte* const data = memory.data(registered);
                        const Bytes before = values(DType::float32, 1000, 3);
                        upload(rank, data, before, stream);
                        plugin->enqueue(all_reduce(data, rank.rank() == 1 ? 999 : 1000, stream, 17));
                        expect_mismatch(*plugin, 17);
                        rank.barrier();
                        plugin->abort();
                        finish(rank, stream);
                        require(same(DType::float32, download(rank, data, before.size(), stream), before),
                                "data was changed");
                        bool refused = false;
                        try {
                          plugin->enqueue(all_reduce(data, 1000, stream, 18));
                        } catch (const Aborted&) {
                          refused = true;
                        }
                        require(refused, "enqueue worked after abort");
                      }),
            "");
}

TEST(CudaFailure, RegisteredOnOneRankAloneIsAMismatch) {
  EXPECT_EQ(run_ranks(2, 60,
                      [](Rank& rank) {
                        const auto plugin = rank.make();
                        const Memory memory(rank, *plugin, kBytes);
                        void* const stream = rank.runtime().make_stream(0);
                        Operation operation = all_reduce(memory.data(rank.rank() == 0), 1000, stream, 5);
                        operation.op = Op::reduce;
                        plugin->enqueue(operation);
                        expect_mismatch(*plugin, 5);
                        rank.barrier();
                        plugin->abort();
                        finish(rank, stream);
                      }),
            "");
}

TEST(CudaFailure, DifferentCallsAreAMismatchHoweverTheyWait) {
  EXPECT_EQ(run_ranks(3, 60,
                      [](Rank& rank) {
                        const auto plugin = rank.make();
                        const Memory memory(rank, *plugin, kBytes);
                        void* const stream = rank.runtime().make_stream(0);
                        plugin->enqueue(all_reduce(memory.data(false), 10, stream, 1));
                        Operation operation = all_reduce(memory.data(rank.rank() == 1), 1000, stream, 2);
                        if (rank.rank() == 2) operation.op = Op::barrier;
                        plugin->enqueue(operation);
                        expect_mismatch(*plugin, 2);
                        rank.barrier();
                        plugin->abort();
                        finish(rank, stream);
                      }),
            "");
}

TEST(CudaFailure, SeveralHostsAreRefused) {
  EXPECT_EQ(run_ranks(2, 60,
                      [](Rank& rank) {
                        try {
                          rank.make("world", {0, 1});
                        } catch (const Unsupported& error) {
                          require(std::string(error.what()).find("nccl") != std::string::npos, error.what());
                          return;
                        }
                        require(false, "a group of two hosts was made");
                      }),
            "");
}

/// What the rank that is killed does at that time.
enum class Doing { nothing, waiting, working };

class Kills : public testing::TestWithParam<std::tuple<Doing, bool>> {};
INSTANTIATE_TEST_SUITE_P(While, Kills,
                         testing::Combine(testing::Values(Doing::nothing, Doing::waiting, Doing::working),
                                          testing::Bool()));

TEST_P(Kills, ReleaseTheOthersAndLeaveNoMemoryBehind) {
  const auto [doing, registered] = GetParam();
  EXPECT_EQ(
      run_ranks(3, 60,
                [doing = doing, registered = registered](Rank& rank) {
                  void* const stream = rank.runtime().make_stream(0);
                  std::size_t free_before = 0;
                  std::size_t free_after = 0;
                  std::size_t total = 0;
                  rank.barrier();
                  ::cudaMemGetInfo(&free_before, &total);
                  rank.barrier();
                  {
                    auto plugin = rank.make();
                    const Memory memory(rank, *plugin, kBytes);
                    const Operation large = all_reduce(memory.data(registered), kBytes / 4, stream, 1);
                    plugin->enqueue(large);
                    finish(rank, stream);
                    rank.barrier();
                    constexpr int kVictim = 0;  // leads on registered memory
                    if (rank.rank() == kVictim) {
                      rank.expect_to_die();
                      // Waiting: rank 1 never calls it. Working: all do, again and again.
                      for (int i = 0; i < kCalls && doing != Doing::nothing; ++i) plugin->enqueue(large);
                      ::usleep(doing == Doing::working ? 3000 : 100000);  // sleep: to be killed in the middle of it
                      ::raise(SIGKILL);
                    }
                    if (doing == Doing::working || rank.rank() == 2) {
                      for (int i = 0; i < kCalls; ++i) plugin->enqueue(large);
                    }
                    ::usleep(300000);  // sleep: until the other is dead
                    plugin->abort();
                    finish(rank, stream, 5);
                    void* more = nullptr;
                    require(::cudaMalloc(&more, 1 << 20) == cudaSuccess, "cudaMalloc failed after the abort");
                    ::cudaFree(more);
                  }
                  rank.barrier();
                  ::cudaMemGetInfo(&free_after, &total);
                  // The context of the dead rank is gone with it; all else must be as before.
                  require(free_after + (std::size_t{16} << 20) >= free_before,
                          std::to_string((free_before - free_after) >> 20) + " MiB are still held");
                  rank.barrier();
                }),
      "");
}

TEST(CudaFailure, AbortEndsAnEnqueueThatIsBlocked) {
  EXPECT_EQ(run_ranks(2, 60,
                      [](Rank& rank) {
                        const auto plugin = rank.make();
                        const Memory memory(rank, *plugin, kBytes);
                        void* const stream = rank.runtime().make_stream(0);
                        rank.barrier();
                        if (rank.rank() == 1) {
                          std::atomic<bool> refused{false};
                          std::thread caller([&] {
                            try {
                              for (int i = 0; i < 5000; ++i)
                                plugin->enqueue(all_reduce(memory.data(false), 100, stream, 1));
                            } catch (const Aborted&) {
                              refused = true;
                            }
                          });
                          ::usleep(300000);  // sleep: until the stream is full
                          plugin->abort();
                          caller.join();
                          require(refused, "enqueue worked after abort");
                          finish(rank, stream, 5);
                        }
                        rank.barrier();
                      }),
            "");
}

class BlockedStreams : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Groups, BlockedStreams, testing::Values(1, 2, 4, 8), testing::PrintToStringParamName());

TEST_P(BlockedStreams, AreAllReleased) {
  const int groups = GetParam();
  EXPECT_EQ(
      run_ranks(
          2, 30,
          [groups](Rank& rank) {
            std::vector<DevicePlugin*> plugins;  // not freed: that would wait for streams which a failure left blocked
            std::vector<void*> streams;
            std::byte* data = nullptr;
            require(::cudaMalloc(reinterpret_cast<void**>(&data), 4096) == cudaSuccess, "cudaMalloc failed");
            for (int i = 0; i < groups; ++i) {
              plugins.push_back(rank.make("group" + std::to_string(i)).release());
              streams.push_back(rank.runtime().make_stream(0));
            }
            rank.barrier();
            if (rank.rank() == 1) {
              for (int i = 0; i < groups; ++i) plugins[i]->enqueue(all_reduce(data, 100, streams[i], 1));
              for (DevicePlugin* const plugin : plugins) plugin->abort();
              for (void* const stream : streams) finish(rank, stream, 2);
            }
            rank.barrier();
          }),
      "");
}

}  // namespace
}  // namespace maniple::device_test
