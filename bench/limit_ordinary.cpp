// The limit for n processes that all-reduce private buffers, the yardstick for ordinary memory.
//
// The buffer moves in chunks through shared slots that stay in the cache. Each rank copies its chunk into its slot and
// adds the other ranks' chunks directly from their slots; a ring of slots lets copying run ahead of adding. For n ranks
// each byte is copied once and read n - 1 times, which is the minimum for two ranks.
#include <algorithm>
#include <cstring>

#include "bench/forked_ranks.h"
#include "tools/bench/measure.h"

namespace maniple::bench {
namespace {

constexpr std::size_t kChunk = 128 * 1024;  // bytes
constexpr std::uint64_t kSlots = 4;

void add(float* __restrict into, const float* __restrict from, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) into[i] += from[i];
}

/// The shared state: a ring of slots and two chunk counters per rank.
struct Stage {
  explicit Stage(int count)
      : ranks(count),
        slots(shared_memory(kChunk * kSlots * count)),
        filled(new(shared_memory(sizeof(Flag) * count)) Flag[count]),
        consumed(new(shared_memory(sizeof(Flag) * count)) Flag[count]) {}

  std::byte* slot(int rank, std::uint64_t chunk) const {
    return slots + (static_cast<std::size_t>(rank) * kSlots + chunk % kSlots) * kChunk;
  }

  int ranks;
  std::byte* slots;
  Flag* filled;    ///< total chunks that a rank has put into its slots
  Flag* consumed;  ///< total chunks that a rank has added from all other ranks
};

class Staged final : public Communicator {
 public:
  Staged(int rank, Stage stage, SharedLargest agreement) : rank_(rank), stage_(stage), agreement_(agreement) {}

  int rank() const override { return rank_; }
  std::string transport() const override { return "shm"; }
  std::byte* memory(std::size_t bytes) override { return memory_.at_least(bytes); }
  std::uint64_t largest(std::uint64_t value) override { return agreement_.of(rank_, value); }

  void prepare(const Case& what, std::byte* in, std::byte*) override {
    data_ = in;
    bytes_ = what.bytes();
  }

  void call() override {
    const std::uint64_t chunks = (bytes_ + kChunk - 1) / kChunk;
    std::uint64_t copied = 0;
    for (std::uint64_t added = 0; added < chunks; ++added) {
      for (; copied < chunks && copied < added + kSlots; ++copied) copy_in(copied);
      add_others(added);
    }
    done_ += chunks;
  }

 private:
  std::size_t length(std::uint64_t chunk) const { return std::min(kChunk, bytes_ - chunk * kChunk); }

  void copy_in(std::uint64_t chunk) {
    const std::uint64_t number = done_ + chunk;
    if (number >= kSlots) {
      for (int other = 0; other < stage_.ranks; ++other) {
        if (other != rank_) stage_.consumed[other].await(number - kSlots + 1);
      }
    }
    std::memcpy(stage_.slot(rank_, number), data_ + chunk * kChunk, length(chunk));
    stage_.filled[rank_].publish(number + 1);
  }

  void add_others(std::uint64_t chunk) {
    const std::uint64_t number = done_ + chunk;
    auto* mine = reinterpret_cast<float*>(data_ + chunk * kChunk);
    for (int other = 0; other < stage_.ranks; ++other) {
      if (other == rank_) continue;
      stage_.filled[other].await(number + 1);
      add(mine, reinterpret_cast<const float*>(stage_.slot(other, number)), length(chunk) / sizeof(float));
    }
    stage_.consumed[rank_].publish(number + 1);
  }

  int rank_;
  Stage stage_;
  SharedLargest agreement_;
  PageMemory memory_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::uint64_t done_ = 0;  // chunks of earlier calls
};

}  // namespace
}  // namespace maniple::bench

int main(int argc, char** argv) {
  using namespace maniple::bench;
  try {
    const WorkItem item = parse_work_item(argc > 1 ? argv[1] : "");
    const Stage stage(item.ranks);
    const SharedLargest agreement(item.ranks);
    return run_forked(item.ranks, [&](int rank) {
      Staged communicator(rank, stage, agreement);
      measure_and_print(communicator, item);
    });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "limit_ordinary: %s\n", error.what());
    return 1;
  }
}
