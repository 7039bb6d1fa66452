// Collectives in place. Registered memory: every rank reads, and for all_reduce, reduce and gather also writes, the
// other ranks' buffers.
//
// Ordinary memory in operations that only move bytes: the kernel copies it from the other process to the reader, if the
// choosing rank (arena_chooser) finds that faster than the stage. If any rank cannot read, all use the stage for this
// and later operations.
//
// A *slice* is the part of the buffer that one rank reduces. all_reduce: each rank reduces its slice from all ranks'
// memory, in rank order, and writes the result to all of them. Cost: two synchronisations; each byte of each buffer is
// read once and written once; the n ranks share the work evenly. Operations that only move bytes pull them from the
// contributor.
//
// The second synchronisation (`finished`) keeps a rank from returning while a peer still reads its buffer.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "comm/base/log.h"
#include "comm/base/rank_arithmetic.h"
#include "comm/collective/shm/arena_call.h"

namespace maniple {
namespace {

// For smaller parts a system call costs more than the second copy.
constexpr std::size_t kLeastRead = 16 * 1024;

class Direct {
 public:
  Direct(ArenaCall& call, const Operation& op, std::uint32_t epoch)
      : call_(call),
        op_(op),
        epoch_(epoch),
        inputs_(call.size()),
        outputs_(call.size()),
        copy_result_(result_copy_of(op, call.size())) {
    uneven_ = op.op == Op::all_to_all && !(op.in_parts.equal() && op.out_parts.equal());
  }

  /// Whether the inputs can be used in place, and some are read from other processes' ordinary memory.
  bool reads_processes() { return resolve() && processes_; }

  bool run() {
    if (!resolve()) return false;
    if (processes_ && refs(arena_chooser(op_)).staged != 0) return false;
    switch (op_.op) {
      case Op::all_reduce: all_reduce(); break;
      case Op::reduce: reduce_to_root(); break;
      case Op::reduce_scatter: reduce_range(op_.parts.offset(me()), op_.parts.count(me()), op_.out); break;
      case Op::broadcast:
        if (me() != op_.root) copy(op_.out, op_.root, 0, op_.count);
        break;
      case Op::scatter: copy(op_.out, op_.root, op_.parts.offset(me()), op_.parts.count(me())); break;
      case Op::gather:
        if (gathered_ != nullptr) {
          give_to_root();
        } else if (me() == op_.root) {
          collect();
        }
        break;
      case Op::all_gather: collect(); break;
      case Op::all_to_all:
        for (int r : others_and_me()) {
          copy(op_.out + op_.out_parts.offset(r) * element(), r, offset_to_me(r), op_.out_parts.count(r));
        }
        break;
      default: return false;
    }
    if (failed_) call_.arena.contribution(me(), epoch_).refs().failed = 1;  // initially published as 0
    call_.arena.set(Counter::finished, epoch_);
    call_.context.forget_ticks();  // the timestamp is the wait for the contributions: not the end, and not recent
    call_.arena.await_all(Counter::finished, epoch_, call_.context);
    return !processes_ || all_could_read();
  }

 private:
  int me() const { return call_.rank(); }
  int size() const { return call_.size(); }
  std::size_t element() const { return op_.element(); }
  const Contribution::Refs& refs(int rank) { return call_.arena.contribution(rank, epoch_).refs(); }

  // All ranks read the same contributions, so all decide the same.
  bool resolve() {
    const bool only_root = op_.op == Op::broadcast || op_.op == Op::scatter;
    if (uneven_ && !arena_holds_counts(call_.arena)) return false;
    if (op_.op == Op::gather && refs(op_.root).out.segment != 0) {
      gathered_ =
          me() == op_.root ? op_.out : call_.registered.resolve(refs(op_.root).out, op_.parts.total() * element());
      return true;
    }
    for (int r = 0; r < size(); ++r) {
      if (only_root && r != op_.root) continue;
      if (refs(r).in.segment == 0 && input_bytes(r) != 0) return false;
      if (op_.op == Op::all_reduce && refs(r).out.segment == 0) return false;
      processes_ = processes_ || refs(r).in.segment == SharedRef::kProcess;
    }
    if (processes_ && largest_part() < kLeastRead) return false;
    if (op_.op == Op::reduce && refs(op_.root).out.segment == 0) return false;
    for (int r = 0; r < size(); ++r) {
      if (only_root && r != op_.root) continue;
      if (input_bytes(r) != 0 && refs(r).in.segment != SharedRef::kProcess)
        inputs_[r] = call_.registered.resolve(refs(r).in, input_bytes(r));
      if (op_.op == Op::all_reduce || (op_.op == Op::reduce && r == op_.root)) {
        outputs_[r] = call_.registered.resolve(refs(r).out, op_.bytes());
      }
    }
    if (uneven_) {
      for (int r = 0; r < size(); ++r) check_arena_count(call_.arena, r, counts(r)[me()], op_.out_parts.count(r));
    }
    return true;
  }

  // Counts that `rank` sends to each rank in an uneven all_to_all.
  const std::uint64_t* counts(int rank) const {
    return reinterpret_cast<const std::uint64_t*>(call_.arena.payload(rank, epoch_, call_.arena.payload_bytes()));
  }

  std::size_t offset_to_me(int rank) const {
    return uneven_ ? std::accumulate(counts(rank), counts(rank) + me(), std::size_t{0}) : op_.in_parts.offset(me());
  }

  // The most bytes that one rank reads from another.
  std::size_t largest_part() {
    std::size_t most = op_.op == Op::broadcast ? op_.count : op_.parts.largest();
    for (int r = 0; r < size() && op_.op == Op::all_to_all; ++r) most = std::max<std::size_t>(most, refs(r).extra);
    return most * element();
  }

  bool all_could_read() {
    for (int r = 0; r < size(); ++r) {
      if (refs(r).failed == 0) continue;
      call_.arena.stop_reading_peers();
      log_info(
          "rank {} cannot read the memory of other processes: all operations of ordinary memory go through shared "
          "memory",
          call_.arena.global_rank(r));
      return false;
    }
    return true;
  }

  std::size_t input_bytes(int rank) const {
    switch (op_.op) {
      case Op::gather:
      case Op::all_gather: return op_.parts.count(rank) * element();
      case Op::scatter:
      case Op::reduce_scatter: return op_.parts.total() * element();
      case Op::all_to_all:
        return (uneven_ ? std::accumulate(counts(rank), counts(rank) + size(), std::size_t{0}) : op_.in_parts.total()) *
               element();
      default: return op_.bytes();
    }
  }

  void all_reduce() {
    const Slices slices(op_.count, element(), size());
    const std::size_t begin = slices.begin(me());
    RankList<void*> destinations(size());
    for (int r = 0; r < size(); ++r) destinations[r] = outputs_[r] + begin * element();
    reduce_from(begin, slices.size(me()), destinations.span());
  }

  void reduce_to_root() {
    const Slices slices(op_.count, element(), size());
    const std::size_t begin = slices.begin(me());
    reduce_range(begin, slices.size(me()), outputs_[op_.root] + begin * element());
  }

  void reduce_range(std::size_t begin, std::size_t count, std::byte* to) {
    void* destination = to;
    reduce_from(begin, count, {&destination, 1});
  }

  void reduce_from(std::size_t begin, std::size_t count, std::span<void* const> destinations) {
    if (count == 0) return;
    RankList<const void*> sources(size());
    for (int r = 0; r < size(); ++r) sources[r] = inputs_[r] + begin * element();
    reduce(reduction_of(op_, call_.size()), sources.span(), destinations, count);
  }

  // All ranks write at the same time, instead of the root fetching everything itself.
  void give_to_root() {
    std::byte* const to = gathered_ + op_.parts.offset(me()) * element();
    if (to != op_.in) copy_result_(to, op_.in, op_.parts.count(me()) * element());
  }

  void collect() {
    for (int r : others_and_me()) {
      copy(op_.out + op_.parts.offset(r) * element(), r, 0, op_.parts.count(r));
    }
  }

  // Each rank starts with the next one, so that not all read the same memory at once.
  std::vector<int> others_and_me() const {
    std::vector<int> order;
    for (int i = 1; i <= size(); ++i) order.push_back((me() + i) % size());
    return order;
  }

  // Copies elements of a rank's input, from `offset` on.
  void copy(std::byte* to, int rank, std::size_t offset, std::size_t count) {
    const std::size_t bytes = count * element();
    if (bytes == 0 || failed_) return;
    if (rank == me() || refs(rank).in.segment != SharedRef::kProcess) {
      const std::byte* from = (rank == me() ? op_.in : inputs_[rank]) + offset * element();
      if (to != from) copy_result_(to, from, bytes);
    } else {
      failed_ = !read(rank, to, refs(rank).in.offset + offset * element(), bytes);
    }
  }

  // The kernel's copy also reads the memory it overwrites, so very large results go through a buffer that stays in the
  // cache.
  bool read(int rank, std::byte* to, std::uint64_t from, std::size_t bytes) {
    if (!copy_result_.is_very_large()) return call_.arena.read_peer(rank, to, from, bytes);
    constexpr std::size_t kMax = 128 * 1024;
    cached_.resize(kMax);
    for (std::size_t at = 0; at < bytes; at += kMax) {
      const std::size_t now = std::min(kMax, bytes - at);
      if (!call_.arena.read_peer(rank, cached_.data(), from + at, now)) return false;
      copy_result_(to + at, cached_.data(), now);
    }
    return true;
  }

  ArenaCall& call_;
  const Operation& op_;
  std::uint32_t epoch_;
  RankList<std::byte*> inputs_;
  RankList<std::byte*> outputs_;
  std::byte* gathered_ = nullptr;  // the root's registered memory
  ResultCopy copy_result_;
  std::vector<std::byte> cached_;
  bool uneven_ = false;     // all_to_all with counts
  bool processes_ = false;  // some input is ordinary memory
  bool failed_ = false;     // reading it failed
};

}  // namespace

bool arena_has_choice(ArenaCall& call, const Operation& op, std::uint32_t epoch) {
  return Direct(call, op, epoch).reads_processes();
}

bool arena_direct(ArenaCall& call, const Operation& op, std::uint32_t epoch) {
  if (call.forced == "staged" || op.op == Op::barrier) return false;
  return Direct(call, op, epoch).run();
}

}  // namespace maniple
