// The plugin cuda when ranks call different things, or when one is killed.
#include <cuda_runtime_api.h>
#include <sched.h>
#include <unistd.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "plugins/cases.h"
#include "plugins/device_ranks.h"

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
  EXPECT_EQ(run_ranks(3, 20,
                      [registered](Rank& rank) {
                        const auto plugin = rank.make();
                        const Memory memory(rank, *plugin, kBytes);
                        void* const stream = rank.runtime().make_stream(0).handle;
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
  EXPECT_EQ(run_ranks(2, 20,
                      [](Rank& rank) {
                        const auto plugin = rank.make();
                        const Memory memory(rank, *plugin, kBytes);
                        void* const stream = rank.runtime().make_stream(0).handle;
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
  EXPECT_EQ(run_ranks(3, 20,
                      [](Rank& rank) {
                        const auto plugin = rank.make();
                        const Memory memory(rank, *plugin, kBytes);
                        void* const stream = rank.runtime().make_stream(0).handle;
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
  EXPECT_EQ(run_ranks(2, 20,
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

/// What the rank that is killed does at that time: nothing; waits in a collective that rank 1 never calls; works in
/// collectives with all others; computes before it has joined one.
enum class Doing { nothing, waiting, working, computing };

using Kill = std::tuple<Doing, bool>;
class Kills : public testing::TestWithParam<Kill> {};
std::string name_of(const testing::TestParamInfo<Kill>& test) {
  const char* const names[] = {"Idle", "Waiting", "Working", "Computing"};
  return std::string(names[static_cast<int>(std::get<0>(test.param))]) +
         (std::get<1>(test.param) ? "Registered" : "Ordinary");
}
INSTANTIATE_TEST_SUITE_P(While, Kills,
                         testing::Combine(testing::Values(Doing::nothing, Doing::waiting, Doing::working,
                                                          Doing::computing),
                                          testing::Bool()),
                         name_of);

std::size_t free_memory() {
  std::size_t free = 0;
  std::size_t total = 0;
  require(::cudaMemGetInfo(&free, &total) == cudaSuccess, "cudaMemGetInfo failed");
  return free;
}

void be_killed(Rank& rank, DevicePlugin& plugin, const Operation& large, Doing doing) {
  rank.expect_to_die();
  if (doing == Doing::computing) {
    for (int i = 0; i < 500; ++i) {
      ::cudaMemsetAsync(large.out, i, kBytes, static_cast<cudaStream_t>(large.stream));
    }
  }
  for (int i = 0; i < kCalls && doing != Doing::nothing; ++i) plugin.enqueue(large);
  ::usleep(doing == Doing::waiting ? 100000 : 3000);  // sleep: to be killed in the middle of it
  rank.step("is killed");
  ::raise(SIGKILL);
}

/// A client of MPS that is killed while its kernels run, those that wait included, makes the device fail for all
/// clients. Nothing can be done about it from here; the others must notice, and not hang.
bool takes_others_along(Doing doing) {
  return ::getenv("CUDA_MPS_PIPE_DIRECTORY") != nullptr && (doing == Doing::waiting || doing == Doing::computing);
}

void expect_end(Rank& rank, void* stream) {
  const Deadline limit = Deadline::after(std::chrono::seconds(5));
  cudaError_t code = cudaErrorNotReady;
  while (code == cudaErrorNotReady) {
    require(!limit.expired(), "the stream did not get to its end, and no error was reported");
    code = ::cudaStreamQuery(static_cast<cudaStream_t>(stream));
  }
  rank.step(std::string("its stream has ended: ") + ::cudaGetErrorString(code));
  std::fflush(nullptr);
  ::_exit(0);  // nothing more can be done on a device that has failed
}

TEST_P(Kills, ReleaseTheOthersAndLeaveNoMemoryBehind) {
  const auto [doing, registered] = GetParam();
  EXPECT_EQ(run_ranks(3, 20,
                      [doing = doing, registered = registered](Rank& rank) {
                        rank.step("begins");
                        void* const stream = rank.runtime().make_stream(0).handle;
                        rank.barrier();
                        const std::size_t free_before = free_memory();
                        rank.barrier();
                        {
                          auto plugin = rank.make();
                          const Memory memory(rank, *plugin, kBytes);
                          const Operation large = all_reduce(memory.data(registered), kBytes / 4, stream, 1);
                          rank.step("first operation");
                          plugin->enqueue(large);
                          finish(rank, stream);
                          rank.barrier();
                          constexpr int kVictim = 0;  // leads on registered memory
                          if (rank.rank() == kVictim) be_killed(rank, *plugin, large, doing);
                          rank.step("enqueues");
                          if (doing == Doing::working || rank.rank() == 2) {
                            for (int i = 0; i < kCalls; ++i) plugin->enqueue(large);
                          }
                          rank.step("waits for the end of rank 0");
                          ::usleep(300000);  // sleep: until the other is dead
                          rank.step("aborts");
                          plugin->abort();
                          rank.step("waits for its stream");
                          if (takes_others_along(doing)) return expect_end(rank, stream);
                          finish(rank, stream, 5);
                          rank.step("allocates");
                          void* more = nullptr;
                          require(::cudaMalloc(&more, 1 << 20) == cudaSuccess, "cudaMalloc failed after the abort");
                          ::cudaFree(more);
                          rank.step("leaves the group");
                        }
                        rank.barrier();
                        rank.step("makes a new group");
                        {
                          auto plugin = rank.make("again", {}, {1, 2});
                          int* data = nullptr;
                          require(::cudaMalloc(reinterpret_cast<void**>(&data), 4096) == cudaSuccess, "cudaMalloc");
                          plugin->enqueue(all_reduce(reinterpret_cast<std::byte*>(data), 100, stream, 1));
                          finish(rank, stream, 5);
                          require(::cudaFree(data) == cudaSuccess, "cudaFree failed");
                        }
                        rank.barrier();
                        rank.step("counts memory");
                        // The context of the dead rank is gone with it, soon; all else must be as before.
                        const Deadline limit = Deadline::after(std::chrono::seconds(5));
                        while (free_memory() + (std::size_t{16} << 20) < free_before) {
                          require(!limit.expired(),
                                  std::to_string((free_before - free_memory()) >> 20) + " MiB are still held");
                        }
                        rank.barrier();
                        rank.step("is done");
                      }),
            "");
}

TEST(CudaFailure, AbortEndsAnEnqueueThatIsBlocked) {
  EXPECT_EQ(run_ranks(2, 20,
                      [](Rank& rank) {
                        const auto plugin = rank.make();
                        const Memory memory(rank, *plugin, kBytes);
                        void* const stream = rank.runtime().make_stream(0).handle;
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
                          rank.step("enqueues until it is blocked");
                          ::usleep(300000);  // sleep: until the stream is full
                          rank.step("aborts");
                          plugin->abort();
                          caller.join();
                          require(refused, "enqueue worked after abort");
                          rank.step("waits for its stream");
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
          2, 20,
          [groups](Rank& rank) {
            std::vector<DevicePlugin*> plugins;  // not freed: that would wait for streams which a failure left blocked
            std::vector<void*> streams;
            std::byte* data = nullptr;
            require(::cudaMalloc(reinterpret_cast<void**>(&data), 4096) == cudaSuccess, "cudaMalloc failed");
            for (int i = 0; i < groups; ++i) {
              plugins.push_back(rank.make("group" + std::to_string(i)).release());
              streams.push_back(rank.runtime().make_stream(0).handle);
            }
            rank.barrier();
            if (rank.rank() == 1) {
              for (int i = 0; i < groups; ++i) {
                rank.step("enqueues in group " + std::to_string(i));
                plugins[i]->enqueue(all_reduce(data, 100, streams[i], 1));
              }
              for (int i = 0; i < groups; ++i) {
                rank.step("aborts group " + std::to_string(i));
                plugins[i]->abort();
              }
              for (int i = 0; i < groups; ++i) {
                rank.step("waits for the stream of group " + std::to_string(i));
                finish(rank, streams[i], 2);
              }
            }
            rank.barrier();
            rank.step("is done");
          }),
      "");
}

void expect_late(DevicePlugin& plugin, std::uint64_t seq, int rank, bool called) {
  const Deadline limit = Deadline::after(std::chrono::seconds(5));
  const auto is_it = [&](const std::vector<LateRank>& late) {
    return late.size() == 1 && late[0].rank == rank && late[0].called == called;
  };
  const auto waits = [&] { return plugin.waits() != DevicePlugin::Waits::no; };  // yes, where it can tell
  while (!is_it(plugin.late_ranks(seq)) || !waits()) require(!limit.expired(), "the late rank is not named");
}

TEST(CudaFailure, LateRanksAreNamed) {
  EXPECT_EQ(run_ranks(3, 20,
                      [](Rank& rank) {
                        const auto plugin = rank.make();
                        const Memory memory(rank, *plugin, 4096);
                        void* const stream = rank.runtime().make_stream(0).handle;
                        for (const bool registered : {false, true}) {
                          const std::uint64_t seq = registered ? 2 : 1;
                          const Operation operation = all_reduce(memory.data(registered), 100, stream, seq);
                          rank.step(registered ? "registered" : "ordinary");
                          if (rank.rank() != 1) {
                            plugin->enqueue(operation);
                            expect_late(*plugin, seq, 1, false);
                          }
                          rank.barrier();
                          if (rank.rank() == 1) plugin->enqueue(operation);
                          finish(rank, stream, 5);
                          rank.barrier();
                        }
                        // It has called, but its stream is busy.
                        std::atomic<bool> go{false};
                        if (rank.rank() == 1) {
                          ::cudaLaunchHostFunc(
                              static_cast<cudaStream_t>(stream),
                              [](void* flag) {
                                while (!*static_cast<std::atomic<bool>*>(flag)) ::sched_yield();
                              },
                              &go);
                        }
                        plugin->enqueue(all_reduce(memory.data(false), 100, stream, 3));
                        rank.barrier();
                        rank.step("busy stream");
                        if (rank.rank() != 1) expect_late(*plugin, 3, 1, true);
                        rank.barrier();
                        go = true;
                        finish(rank, stream, 5);
                      }),
            "");
}

// Freeing it would wait for a stream that may never end.
TEST(CudaFailure, MemoryOfAGroupThatLeftBusyStays) {
  EXPECT_EQ(run_ranks(2, 30,
                      [](Rank& rank) {
                        auto plugin = rank.make();
                        RegisteredMemory memory = rank.allocate(*plugin, 4096);
                        void* const stream = rank.runtime().make_stream(0).handle;
                        std::atomic<bool> go{false};
                        ::cudaLaunchHostFunc(
                            static_cast<cudaStream_t>(stream),
                            [](void* flag) {
                              while (!*static_cast<std::atomic<bool>*>(flag)) ::sched_yield();
                            },
                            &go);
                        plugin->enqueue(all_reduce(static_cast<std::byte*>(memory.data()), 100, stream, 1));
                        plugin->abort();
                        rank.step("leaves");
                        require(!plugin->finish(), "the stream is busy, and nobody noticed");
                        plugin.reset();
                        rank.step("frees");
                        memory = {};
                        go = true;
                        finish(rank, stream, 5);
                      }),
            "");
}

}  // namespace
}  // namespace maniple::device_test
