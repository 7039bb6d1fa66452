// Ranks for the limit programs: forked processes with one shared mapping and a barrier of flags. Deliberately avoids
// Maniple's communication code, because these programs are its yardstick.
#pragma once

#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>

#include "comm/base/system_error.h"

namespace maniple::bench {

/// Anonymous memory shared with forked children. Never unmapped, because the programs end soon after.
inline std::byte* shared_memory(std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw_system_error("mmap of shared memory");
  madvise(memory, bytes, MADV_HUGEPAGE);  // best effort
  return static_cast<std::byte*>(memory);
}

/// A counter on a cache line of its own.
struct alignas(64) Flag {
  std::atomic<std::uint64_t> value{0};

  void publish(std::uint64_t next) noexcept { value.store(next, std::memory_order_release); }

  /// Spins briefly, then yields the core: there may be more ranks than cores.
  void await(std::uint64_t target) const noexcept {
    for (int spins = 0; value.load(std::memory_order_acquire) < target; ++spins) {
      if (spins > 2000) sched_yield();
    }
  }
};

class FlagBarrier {
 public:
  explicit FlagBarrier(int ranks) : ranks_(ranks), flags_(new(shared_memory(sizeof(Flag) * ranks)) Flag[ranks]) {}

  void pass(int rank) noexcept {
    ++epoch_;
    flags_[rank].publish(epoch_);
    for (int other = 0; other < ranks_; ++other) flags_[other].await(epoch_);
  }

 private:
  int ranks_;
  Flag* flags_;
  std::uint64_t epoch_ = 0;  // counted separately in each process
};

/// Computes the maximum over all ranks' numbers.
class SharedLargest {
 public:
  explicit SharedLargest(int ranks)
      : ranks_(ranks), barrier_(ranks), slots_(new(shared_memory(sizeof(Flag) * ranks)) Flag[ranks]) {}

  std::uint64_t of(int rank, std::uint64_t value) {
    slots_[rank].publish(value);
    barrier_.pass(rank);
    std::uint64_t most = 0;
    for (int other = 0; other < ranks_; ++other) most = std::max(most, slots_[other].value.load());
    barrier_.pass(rank);
    return most;
  }

 private:
  int ranks_;
  FlagBarrier barrier_;
  Flag* slots_;
};

/// Runs `body(rank)` in one process per rank, rank 0 in this process. Returns the program's exit status.
inline int run_forked(int ranks, const std::function<void(int)>& body) {
  const auto guarded = [&](int rank) {
    try {
      body(rank);
      return 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      return 1;
    }
  };
  for (int rank = 1; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child < 0) throw_system_error("fork");
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      _exit(guarded(rank));
    }
  }
  int status = guarded(0);
  for (int rank = 1, ended = 0; rank < ranks && wait(&ended) > 0; ++rank) status |= ended != 0 ? 1 : 0;
  return status;
}

}  // namespace maniple::bench
