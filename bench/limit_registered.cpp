// The limit for n processes that all-reduce a buffer which all of them map, the yardstick for registered memory.
//
// Each rank owns one slice of the buffer: it adds this slice of all ranks, in place, and writes the sum to all of them.
// One barrier precedes the sum (all ranks' data is present) and one follows it (all sums are written). Without checks,
// errors or a queue, only memory and cores limit the speed.
#include <algorithm>
#include <cstring>

#include "bench/forked_ranks.h"
#include "tools/bench/measure.h"

namespace maniple::bench {
namespace {

constexpr std::size_t kBlock = 1024;  // floats; stays in the first-level cache while being summed and written

void reduce_two(float* __restrict mine, float* __restrict theirs, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const float sum = mine[i] + theirs[i];
    mine[i] = sum;
    theirs[i] = sum;
  }
}

void add(float* __restrict into, const float* __restrict from, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) into[i] += from[i];
}

class ZeroCopy final : public Communicator {
 public:
  ZeroCopy(int rank, int ranks, std::byte* base, std::size_t stride, FlagBarrier barrier, SharedLargest agreement)
      : rank_(rank), ranks_(ranks), base_(base), stride_(stride), barrier_(barrier), agreement_(agreement) {}

  int rank() const override { return rank_; }
  std::string transport() const override { return "shm"; }
  std::byte* memory(std::size_t) override { return base_ + stride_ * static_cast<std::size_t>(rank_); }

  void prepare(const Case& what, std::byte*, std::byte*) override {
    const std::size_t slice = (what.count + static_cast<std::size_t>(ranks_) - 1) / static_cast<std::size_t>(ranks_);
    begin_ = std::min(what.count, slice * static_cast<std::size_t>(rank_));
    end_ = std::min(what.count, begin_ + slice);
  }

  void call() override {
    barrier_.pass(rank_);
    if (ranks_ == 2) {
      reduce_two(of(rank_) + begin_, of(1 - rank_) + begin_, end_ - begin_);
    } else {
      for (std::size_t at = begin_; at < end_; at += kBlock) reduce_block(at, std::min(kBlock, end_ - at));
    }
    barrier_.pass(rank_);
  }

  std::uint64_t largest(std::uint64_t value) override { return agreement_.of(rank_, value); }

 private:
  float* of(int rank) const { return reinterpret_cast<float*>(base_ + stride_ * static_cast<std::size_t>(rank)); }

  void reduce_block(std::size_t at, std::size_t count) {
    float* mine = of(rank_) + at;
    for (int other = 0; other < ranks_; ++other) {
      if (other != rank_) add(mine, of(other) + at, count);
    }
    for (int other = 0; other < ranks_; ++other) {
      if (other != rank_) std::memcpy(of(other) + at, mine, count * sizeof(float));
    }
  }

  int rank_, ranks_;
  std::byte* base_;
  std::size_t stride_;
  FlagBarrier barrier_;
  SharedLargest agreement_;
  std::size_t begin_ = 0, end_ = 0;
};

}  // namespace
}  // namespace maniple::bench

int main(int argc, char** argv) {
  using namespace maniple::bench;
  try {
    const WorkItem item = parse_work_item(argc > 1 ? argv[1] : "");
    constexpr std::size_t kPage = 4096;
    const std::size_t stride = (*std::max_element(item.bytes.begin(), item.bytes.end()) + kPage) / kPage * kPage;
    std::byte* base = shared_memory(stride * static_cast<std::size_t>(item.ranks));
    const FlagBarrier barrier(item.ranks);
    const SharedLargest agreement(item.ranks);
    return run_forked(item.ranks, [&](int rank) {
      ZeroCopy communicator(rank, item.ranks, base, stride, barrier, agreement);
      measure_and_print(communicator, item);
    });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "limit_registered: %s\n", error.what());
    return 1;
  }
}
