// The shared memory of one group's ranks on one host: ranks publish their contributions in it, count their progress,
// and stage bytes for each other.
//
// Terms:
//   epoch         number of a synchronisation in which all ranks take part; the same on all ranks
//   contribution  what a rank publishes at the start of an epoch: four words about the call, a hash of all calls so
//                 far, and either a small payload or references to registered memory. Each rank has kContributions
//                 contributions, used in turn.
//   window        kWindow epochs. A rank does not wait for ranks from which it takes nothing, so it may be ahead of
//                 them. It ends the first epoch of a window only when all ranks have published the first epoch of the
//                 previous window. A rank publishes an epoch after it has finished reading all earlier epochs. So no
//                 rank is more than two windows ahead of another, and four windows of contributions hold everything
//                 that a slower rank may still read.
//   stage         each rank's buffers for bytes in transit: several slots, used in turn
//   counter       the number of slots that a rank has filled, reduced or drained since the start, or the last epoch it
//                 has finished; only ever grows (modulo 2^32)
//   ring          a ring buffer: bytes from one rank to another. Two sets: for frames of collectives, and for messages
//   notification  a count for each rank, raised by whoever moved bytes in one of that rank's rings
//
// Every wait spins, then yields, then sleeps (see waiter.h), so there may be more ranks than cores. A rank does not
// spin if the awaited rank is on its own core.
//
// A wait fails when the group is aborted, the awaited rank has left, or the deadline passes. Whatever has arrived by
// then is used first.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/base/abort_signal.h"
#include "comm/base/fork_guard.h"
#include "comm/base/operation_context.h"
#include "comm/base/ticks.h"
#include "comm/shm/arena_layout.h"
#include "comm/shm/faster_way.h"
#include "comm/shm/peer_memory.h"
#include "comm/shm/segment.h"
#include "comm/shm/waiter.h"
#include <maniple/comm/deadline.h>

namespace maniple {

/// The location of a buffer in registered memory. Segment 0: none. Segment kProcess: memory private to the rank's
/// process.
struct SharedRef {
  static constexpr std::uint64_t kProcess = ~std::uint64_t{0};  ///< the offset is an address
  std::uint64_t segment = 0;
  std::uint64_t offset = 0;
};

struct alignas(kCacheLine) Contribution {
  static constexpr std::size_t kSmallPayload = kCacheLine - 48;

  std::atomic<std::uint32_t> stamp;             // the epoch; written last
  std::uint32_t mode;                           // defined by the writer
  std::array<std::uint64_t, 4> words;           // the call
  std::uint64_t history;                        // hash of all calls up to this one
  alignas(8) std::byte payload[kSmallPayload];  // inline, so tiny calls touch one line per rank; see Arena::payload

  struct Refs {
    SharedRef in, out;
    std::uint64_t extra;
    std::uint64_t failed;  // written before `finished`: a read failed
    std::uint64_t staged;  // set by the rank that chooses: 1 to use the stage although reads are possible
  };
  Refs& refs() noexcept { return *reinterpret_cast<Refs*>(payload); }
  const Refs& refs() const noexcept { return *reinterpret_cast<const Refs*>(payload); }
};
static_assert(sizeof(Contribution) == kCacheLine && sizeof(Contribution::Refs) <= Contribution::kSmallPayload);

enum class Counter { filled, reduced, drained, finished };
inline constexpr int kCounterCount = 4;

struct ArenaOptions {
  int rank = 0;
  int size = 1;
  int cores = 1;        ///< cores of this host, to decide between spinning and yielding
  double spin_us = -1;  ///< see WaitPolicy::for_memory
  AbortSignal* abort = nullptr;
  std::vector<int> names;         ///< ranks in the group, for error messages
  std::vector<int> global_ranks;  ///< ranks in the world
};

class Arena {
 public:
  static constexpr int kStageSlots = ArenaLayout::kStageSlots;
  static constexpr std::uint32_t kWindow = 4;
  static constexpr std::uint32_t kContributions = 4 * kWindow;
  static_assert(kContributions == ArenaLayout::kContributions);
  static constexpr std::uint32_t kRefresh = std::uint32_t{1} << 29;

  /// A new, zeroed segment of ArenaLayout::of(...).bytes is an empty arena, so no rank has to initialise it for the
  /// others. The stages are as large as the segment allows, so the rank that creates the segment decides their size.
  Arena(std::shared_ptr<Segment> segment, const ArenaOptions& options);
  ~Arena();  ///< marks this rank as having left; never waits; in a child of fork() it does nothing

  int rank() const noexcept { return options_.rank; }
  int size() const noexcept { return options_.size; }
  /// The world rank of an arena rank.
  int global_rank(int rank) const noexcept {
    return options_.global_ranks.empty() ? rank : options_.global_ranks[rank];
  }

  // ---- Waiting -------------------------------------------------------------------------------------------------

  /// Waits until `word`, written by `rank`, has reached `target`.
  void await(const std::atomic<std::uint32_t>& word, std::uint32_t target, int rank, OperationContext& context) {
    if (!reached(word, target)) [[unlikely]]
      await_slowly(word, target, rank, context);
  }

  // ---- Contributions -------------------------------------------------------------------------------------------

  std::uint32_t next_epoch(std::uint32_t step = 1) noexcept { return epoch_ += step; }
  std::uint32_t epoch() const noexcept { return epoch_; }
  Contribution& contribution(int rank, std::uint32_t epoch) noexcept { return contributions_[index(rank, epoch)]; }
  std::size_t payload_bytes() const noexcept { return layout_.payload_bytes; }
  /// The payload of a contribution. `bytes` is the largest payload of that epoch, the same number on all ranks.
  std::byte* payload(int rank, std::uint32_t epoch, std::size_t bytes) noexcept {
    if (bytes <= Contribution::kSmallPayload) return contribution(rank, epoch).payload;
    return payloads_ + index(rank, epoch) * layout_.payload_bytes;
  }
  void publish(std::uint32_t epoch) {
    // Only some operations update `finished`. Once it lags by half the number range, it would compare as ahead.
    if (epoch % kRefresh == 0) [[unlikely]]
      set(Counter::finished, epoch - 1);
    auto& stamp = contribution(rank(), epoch).stamp;
    stamp.store(epoch, std::memory_order_release);
    wake_if_asleep(stamp);
  }
  /// For long operations: publishes the core this rank runs on, for ranks that wait for it on the same core.
  void show_core_in(std::uint32_t epoch) noexcept {
    show_core();
    of(rank()).core.epoch.store(epoch, std::memory_order_relaxed);
  }
  bool has_published(int rank, std::uint32_t epoch) noexcept { return reached(contribution(rank, epoch).stamp, epoch); }
  /// Waits for the contributions of all ranks, or of one.
  void await_contributions(std::uint32_t epoch, OperationContext& context);
  void await_contribution(int rank, std::uint32_t epoch, OperationContext& context) {
    await(contribution(rank, epoch).stamp, epoch, rank, context);
  }
  /// Whether `epoch` is the first of a window and this rank may be too far ahead to end it. Then it has to wait until
  /// all ranks have contributed to the first epoch of the previous window.
  bool is_ahead(std::uint32_t epoch) const noexcept {
    return epoch % kWindow == 0 && static_cast<std::int32_t>(all_published_ - (epoch - kWindow)) < 0;
  }

  // ---- Stages and counters -------------------------------------------------------------------------------------

  std::size_t stage_slot_bytes() const noexcept { return layout_.stage_slot_bytes; }
  std::byte* stage_slot(int rank, std::uint32_t step) noexcept {
    return segment_->data() + layout_.stage_slot(rank, step);
  }
  /// Steps so far. An operation that used `n` steps adds `n`, on every rank alike.
  std::uint32_t step_base() const noexcept { return steps_; }
  void advance_steps(std::uint32_t n) noexcept { steps_ += n; }
  void set(Counter counter, std::uint32_t value) {
    auto& word = blocks_[rank()].counters[static_cast<int>(counter)].value;
    word.store(value, std::memory_order_release);
    wake_if_asleep(word);
  }
  void await(Counter counter, int rank, std::uint32_t value, OperationContext& context) {
    await(blocks_[rank].counters[static_cast<int>(counter)].value, value, rank, context);
  }
  void await_all(Counter counter, std::uint32_t value, OperationContext& context);

  // ---- Memory of other processes -------------------------------------------------------------------------------

  /// Whether ranks read each other's ordinary memory: every rank has its own core, and no read has failed.
  bool reads_peers() const noexcept { return reads_peers_ && !crowded_; }
  void stop_reading_peers() noexcept { reads_peers_ = false; }
  /// For the rank that chooses between direct reads and the stage: measurements of operations of this kind and about
  /// this size.
  FasterWay& faster_way(int kind, std::size_t bytes) { return faster_ways_[{kind, std::bit_width(bytes)}]; }
  bool read_peer(int rank, void* to, std::uint64_t from, std::size_t bytes) {
    return peer_memory_.read(rank, of(rank).identity, to, from, bytes);
  }

  // ---- Rings ---------------------------------------------------------------------------------------------------

  /// Memory of the ring from one rank to another, initially zero. `set`: 0 for collectives, 1 for messages.
  std::span<std::byte> ring(int set, int from, int to) noexcept {
    return {segment_->data() + layout_.ring(set, from, to), layout_.ring_bytes()};
  }
  /// Memory of the slots for small messages from one rank to another, initially zero.
  std::span<std::byte> slots(int from, int to) noexcept {
    return {segment_->data() + layout_.slots(from, to), layout_.slots_bytes()};
  }
  void notify(int rank);                                           ///< call after moving bytes in a ring of that rank
  Waiter& waiter() noexcept { return waiter_; }                    ///< for other waits for these ranks
  std::uint32_t notifications() const noexcept;                    ///< this rank's count so far
  void await_notification(std::uint32_t seen, Deadline deadline);  ///< sleeps until the count differs from `seen`

  // ---- Ends ----------------------------------------------------------------------------------------------------

  bool has_left(int rank) const noexcept { return departure_of(rank) != LossKind::unknown; }
  /// left: the rank destroyed its group. left_or_ended: another rank found it gone. unknown: it has not left.
  LossKind departure_of(int rank) const noexcept;
  /// Marks a rank whose process has ended, or which has left without its leave notice reaching this rank.
  void mark_gone(int rank) noexcept;
  /// Throws if a rank of this host has failed before finishing `epoch`, because it will not take part in that epoch.
  void check_raised(std::uint32_t epoch) const {
    if (abort_state_->load(std::memory_order_relaxed) != 0) [[unlikely]]
      check_raised_slowly(epoch);
  }
  /// Another rank is about to raise a cause: waits a few seconds for the cause and throws it, or an error that there
  /// was none.
  [[noreturn]] void await_raised() const;
  void finish_epoch(std::uint32_t epoch) noexcept { finished_epoch_.store(epoch, std::memory_order_relaxed); }
  /// Aborts the group on every rank of this host, with all fields of the error; the first cause wins. Safe from any
  /// thread.
  void raise(const std::exception_ptr& cause) noexcept;
  /// The cause raised by a rank of this host, converted for this rank, or null.
  std::exception_ptr raised() const;

 private:
  struct Header;
  struct alignas(kCacheLine) RankBlock {
    struct alignas(kCacheLine) Line {
      std::atomic<std::uint32_t> value;
    };
    Line counters[kCounterCount];
    Line sleepers;               // number of ranks asleep on a word of this rank
    Line notifications;          // see `notify`
    Line notification_sleepers;  // 1 while this rank waits for a notification
    struct alignas(kCacheLine) Core {
      std::atomic<std::uint32_t>
          value;  // 1 + the core on which this rank last slept, woke another, or called a large operation; 0: neither
      std::atomic<std::uint32_t> epoch;  // epoch of that operation
    };
    Core core;
    alignas(kCacheLine) PeerMemory::Identity identity;
    Line left;  // 1: this rank destroyed its group; 2: another rank found it gone
  };
  // Consecutive contributions are not adjacent in memory. Otherwise a processor that detects sequential reads would
  // prefetch the next one just before it is written.
  static std::size_t index(int rank, std::uint32_t epoch) noexcept {
    constexpr std::uint64_t kReversed = 0xf7b3d591e6a2c480;  // digit i is i with its 4 bits reversed
    static_assert(kContributions == 16);
    return rank * kContributions + (kReversed >> (epoch % kContributions * 4) & 15);
  }
  static bool reached(const std::atomic<std::uint32_t>& word, std::uint32_t target) noexcept {
    return static_cast<std::int32_t>(load_acquire(word) - target) >= 0;
  }
  void await_slowly(const std::atomic<std::uint32_t>& word, std::uint32_t target, int rank, OperationContext& context);
  // There is no fence between storing the new value and this load: it would wait until the value is visible to the
  // other cores, a fifth of the time of the smallest operation. For about a microsecond, a rank that is about to sleep
  // may be missed here and may itself miss the value. Sleepers allow for that: their first sleep is short
  // (WaitPolicy::kFirstSleep).
  void wake_if_asleep(const std::atomic<std::uint32_t>& word) {
    if (blocks_[rank()].sleepers.value.load(std::memory_order_relaxed) != 0) [[unlikely]]
      wake(word);
  }
  void wake(const std::atomic<std::uint32_t>& word);
  void show_core() noexcept;
  bool is_on_this_core(int rank) const noexcept;
  bool leave_core_of(int rank, std::uint64_t now) noexcept;
  void wake_sleepers_on(int rank) noexcept;
  void wake_all_for(int rank) noexcept;
  void await_written_cause() const;
  void check_raised_slowly(std::uint32_t epoch) const;
  [[noreturn]] void throw_raised() const;
  [[noreturn]] void fail_waiting(int rank, Deadline::Clock::time_point since);
  int name_of(int rank) const { return options_.names.empty() ? rank : options_.names[rank]; }
  RankBlock& of(int rank) const noexcept { return blocks_[rank]; }
  Header& header() const noexcept;

  ForkGuard guard_;
  ArenaOptions options_;
  PeerMemory peer_memory_;
  bool reads_peers_ = true;
  std::map<std::pair<int, int>, FasterWay> faster_ways_;
  std::shared_ptr<Segment> segment_;
  ArenaLayout layout_;
  RankBlock* blocks_ = nullptr;  // one for each rank
  Contribution* contributions_ = nullptr;
  std::byte* payloads_ = nullptr;
  const std::atomic<std::uint32_t>* abort_state_ = nullptr;
  std::uint32_t epoch_ = 0;
  std::uint32_t all_published_ = 0;               // an epoch that all ranks have published
  std::atomic<std::uint32_t> finished_epoch_{0};  // read by the thread that raises
  std::uint32_t steps_ = 0;
  Waiter waiter_;
  std::uint64_t left_core_ = 0;  // when this rank last moved to another core
  bool crowded_ = false;         // more ranks than cores, so ranks must yield to each other
};

}  // namespace maniple
