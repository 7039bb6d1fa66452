// The shared memory of the ranks of one group on one host: where they publish their contributions, count how far they got, and
// stage bytes for each other.
//
// Words:
//   epoch         number of a synchronisation in which all ranks take part; the same on all ranks
//   contribution  what a rank publishes at the start of an epoch: four words about the call, and either a small payload or
//                 references to registered memory. Two per rank, used in turn: a rank reaches epoch e+2 only after all have
//                 published e+1, and a rank publishes e+1 only when it has finished reading the contributions of e.
//   stage         each rank's buffers for bytes in transit: some slots, used in turn
//   counter       how many slots a rank has filled, reduced, drained since the beginning, and the last epoch that it has finished;
//                 only ever grows (modulo 2^32)
//   ring          a ring buffer: bytes from one rank to one other. Two sets: for frames of collectives, and for messages
//   notification  a count for each rank, raised by whoever moved bytes in a ring of that rank
//
// All waiting is spin, then yield, then sleep (futex), so that more ranks than cores works. It ends with an error when the
// group is aborted, the awaited rank has left, or the deadline passes; what has arrived by then is used first.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/abort_signal.h"
#include "base/operation_context.h"
#include "shm/segment.h"
#include <maniple/comm/deadline.h>

namespace maniple {

inline constexpr std::size_t kCacheLine = 128;

/// Where a buffer lies in registered memory; segment 0 is none.
struct SharedRef {
  std::uint64_t segment = 0;
  std::uint64_t offset = 0;
};

struct alignas(kCacheLine) Contribution {
  static constexpr std::size_t kPayload = 8192;

  std::atomic<std::uint32_t> stamp;        // the epoch; written last
  std::uint32_t mode;                      // given a meaning by its writer
  std::array<std::uint64_t, 4> words;      // what is called
  alignas(8) std::byte payload[kPayload];  // starts in the first cache line: tiny calls touch one line per rank

  struct Refs {
    SharedRef in, out;
    std::uint64_t extra;
  };
  Refs& refs() noexcept { return *reinterpret_cast<Refs*>(payload); }
  const Refs& refs() const noexcept { return *reinterpret_cast<const Refs*>(payload); }
};

enum class Counter { filled, reduced, drained, finished };
inline constexpr int kCounterCount = 4;

struct ArenaOptions {
  int rank = 0;
  int size = 1;
  int cores = 1;        ///< of this host, to decide between spinning and yielding
  double spin_us = -1;  ///< -1: by cores and ranks
  AbortSignal* abort = nullptr;
  std::vector<int> names;         ///< what errors call the ranks: their ranks in the group
  std::vector<int> global_ranks;  ///< and in the world
};

class Arena {
 public:
  static constexpr int kStageSlots = 4;
  static constexpr std::uint32_t kRefresh = std::uint32_t{1} << 29;

  /// Bytes of shared memory needed, with so many for the stage of each rank (whole pages).
  static std::size_t bytes_for(int size, std::size_t stage_bytes);
  static std::size_t stage_bytes_for(int size);

  /// A fresh segment (all zero) is an empty arena: no rank needs to set it up for another. The stages are as large as
  /// the segment allows, so its maker alone decides.
  Arena(std::shared_ptr<Segment> segment, const ArenaOptions& options);
  ~Arena();  ///< marks this rank as having left; never waits

  int rank() const noexcept { return options_.rank; }
  int size() const noexcept { return options_.size; }
  /// Of a rank of the arena: its number in the world.
  int global_rank(int rank) const noexcept {
    return options_.global_ranks.empty() ? rank : options_.global_ranks[static_cast<std::size_t>(rank)];
  }

  // ---- Waiting -------------------------------------------------------------------------------------------------

  /// Waits until `word`, owned by `rank`, has reached `target`.
  void await(const std::atomic<std::uint32_t>& word, std::uint32_t target, int rank, OperationContext& context) {
    if (!reached(word, target)) [[unlikely]]
      await_slowly(word, target, rank, context);
  }

  // ---- Contributions -------------------------------------------------------------------------------------------

  std::uint32_t next_epoch(std::uint32_t step = 1) noexcept { return epoch_ += step; }
  Contribution& contribution(int rank, std::uint32_t epoch) noexcept { return blocks_[rank].contributions[epoch & 1]; }
  void publish(std::uint32_t epoch) {
    // Only some operations count what is finished. Half the range behind, that counter would seem to be ahead.
    if (epoch % kRefresh == 0) [[unlikely]]
      set(Counter::finished, epoch - 1);
    auto& stamp = contribution(rank(), epoch).stamp;
    stamp.store(epoch, std::memory_order_seq_cst);
    wake_if_asleep(stamp);
  }
  void await_contributions(std::uint32_t epoch, OperationContext& context);

  // ---- Stages and counters -------------------------------------------------------------------------------------

  std::size_t stage_slot_bytes() const noexcept { return stage_slot_bytes_; }
  std::byte* stage_slot(int rank, std::uint32_t step) noexcept;
  /// Steps so far; an operation that used `n` steps adds them, on every rank alike.
  std::uint32_t step_base() const noexcept { return steps_; }
  void advance_steps(std::uint32_t n) noexcept { steps_ += n; }
  void set(Counter counter, std::uint32_t value) {
    auto& word = blocks_[rank()].counters[static_cast<int>(counter)].value;
    word.store(value, std::memory_order_seq_cst);
    wake_if_asleep(word);
  }
  void await(Counter counter, int rank, std::uint32_t value, OperationContext& context) {
    await(blocks_[rank].counters[static_cast<int>(counter)].value, value, rank, context);
  }
  void await_all(Counter counter, std::uint32_t value, OperationContext& context);

  // ---- Rings ---------------------------------------------------------------------------------------------------

  /// Memory for the ring from one rank to another; `set` 0 or 1. Zeroed at first.
  std::span<std::byte> ring(int set, int from, int to) noexcept;
  void notify(int rank);  ///< something moved in a ring of that rank
  /// How long a rank spins before it yields its core.
  std::uint64_t spin_ticks() const noexcept { return spin_ticks_; }
  std::uint32_t notifications() const noexcept;                    ///< of this rank, so far
  void await_notification(std::uint32_t seen, Deadline deadline);  ///< sleeps until there are others than the `seen`

  // ---- Ends ----------------------------------------------------------------------------------------------------

  bool has_left(int rank) const noexcept { return departure_of(rank) != LossKind::unknown; }
  /// left: it has destroyed its group; left_or_ended: another rank found that it is gone; unknown: it is here.
  LossKind departure_of(int rank) const noexcept;
  /// On behalf of a rank whose process has ended, or which has left without its notice reaching this rank.
  void mark_gone(int rank) noexcept;
  /// Throws if a rank of this host has failed and had not finished this epoch: it will not take part in it.
  void check_raised(std::uint32_t epoch) const {
    if (abort_state_->load(std::memory_order_acquire) != 0) [[unlikely]]
      check_raised_slowly(epoch);
  }
  void finish_epoch(std::uint32_t epoch) noexcept { finished_epoch_.store(epoch, std::memory_order_relaxed); }
  /// Tells every rank of this host, with all fields of the error; the first cause wins. Safe from any thread.
  void raise(const std::exception_ptr& cause) noexcept;
  /// The cause that some rank of this host raised, as it is on this one, or null.
  std::exception_ptr raised() const;

 private:
  struct Header;
  struct alignas(kCacheLine) RankBlock {
    Contribution contributions[2];
    struct alignas(kCacheLine) Line {
      std::atomic<std::uint32_t> value;
    };
    Line counters[kCounterCount];
    Line sleepers;               // ranks asleep on a word of this rank
    Line notifications;          // see `notify`
    Line notification_sleepers;  // 1 while this rank waits for a notification
    Line left;                   // 1 once this rank has destroyed its group; 2: another rank found that it is gone
  };
  static bool reached(const std::atomic<std::uint32_t>& word, std::uint32_t target) noexcept {
    return static_cast<std::int32_t>(word.load(std::memory_order_acquire) - target) >= 0;
  }
  void await_slowly(const std::atomic<std::uint32_t>& word, std::uint32_t target, int rank, OperationContext& context);
  // Sleepers announce themselves before they look again (both sequentially consistent), so either they see the new value or
  // we see them.
  void wake_if_asleep(const std::atomic<std::uint32_t>& word) {
    if (blocks_[rank()].sleepers.value.load(std::memory_order_seq_cst) != 0) [[unlikely]]
      futex_wake_all(word);
  }
  void wake_all_for(int rank) noexcept;
  void check_raised_slowly(std::uint32_t epoch) const;
  [[noreturn]] void throw_raised() const;
  [[noreturn]] void fail_waiting(int rank, Deadline::Clock::time_point since);
  int name_of(int rank) const { return options_.names.empty() ? rank : options_.names[static_cast<std::size_t>(rank)]; }
  RankBlock& of(int rank) const noexcept { return blocks_[rank]; }
  Header& header() const noexcept;

  ArenaOptions options_;
  std::shared_ptr<Segment> segment_;
  RankBlock* blocks_ = nullptr;  // one for each rank
  const std::atomic<std::uint32_t>* abort_state_ = nullptr;
  std::uint32_t epoch_ = 0;
  std::atomic<std::uint32_t> finished_epoch_{0};  // read by the thread that raises
  std::uint32_t steps_ = 0;
  std::size_t stage_slot_bytes_ = 0;
  std::size_t stage_offset_ = 0;
  std::size_t ring_offset_ = 0;
  std::size_t ring_bytes_ = 0;
  std::uint64_t spin_ticks_ = 0;
  std::uint64_t yield_ticks_ = 0;
};

}  // namespace maniple
