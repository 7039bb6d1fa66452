// Operations that move bytes (and reduce_scatter) in ordinary memory, through the stages.
//
// In step k every contributor fills its slot with the k-th *block* of its contribution, and every receiver drains its
// data from the others' slots. A slot holds either one block for all (broadcast, gather, all_gather) or one *cell* per
// receiver (scatter, reduce_scatter, all_to_all). Filling runs one slot ahead of draining, so copies in and out
// overlap.
//
// Cost per rank: one copy in, one copy out. A rank's own part is copied directly, not through the stage.

#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/collective/shm/arena_call.h"

namespace maniple {
namespace {

class StagedMove {
 public:
  StagedMove(ArenaCall& call, const Operation& op, std::uint32_t epoch)
      : call_(call),
        arena_(call.arena),
        op_(op),
        epoch_(epoch),
        element_(op.element()),
        me_(call.rank()),
        size_(call.size()),
        copy_result_(result_copy_of(op, call.size())) {
    cells_ = op.op == Op::scatter || op.op == Op::reduce_scatter || op.op == Op::all_to_all;
    const std::size_t bytes = cells_ ? arena_.stage_slot_bytes() / size_ : arena_.stage_slot_bytes();
    base_ = arena_.step_base();
    std::size_t longest = op.op == Op::broadcast ? op.count : op.parts.largest();
    if (op.op == Op::all_to_all) {
      for (int r = 0; r < size_; ++r)
        longest = std::max<std::size_t>(longest, arena_.contribution(r, epoch_).refs().extra);
      exchange_counts_ = true;
    }
    // Two blocks suffice for filling and draining to overlap.
    constexpr std::size_t kLeast = 32 * 1024;
    block_ = std::max<std::size_t>(1, std::min(bytes, std::max(longest * element_ / 2, kLeast)) / element_);
    steps_ = static_cast<std::uint32_t>((longest + block_ - 1) / block_) + (exchange_counts_ ? count_steps() : 0);
  }

  void run() {
    const bool fills = contributes(me_);
    const bool drains = receives(me_);
    copy_own_part();
    if (!fills) arena_.set(Counter::filled, base_ + steps_);
    if (!drains) arena_.set(Counter::drained, base_ + steps_);
    arena_.set(Counter::reduced, base_ + steps_);
    for (std::uint32_t k = 0; k < steps_ + 1; ++k) {
      if (fills && k < steps_) fill(k);
      if (drains && k >= 1) drain(k - 1);
    }
    arena_.advance_steps(steps_);
  }

 private:
  bool contributes(int rank) const { return (op_.op != Op::broadcast && op_.op != Op::scatter) || rank == op_.root; }
  bool receives(int rank) const {
    if (op_.op == Op::gather) return rank == op_.root;
    if (op_.op == Op::broadcast || op_.op == Op::scatter) return rank != op_.root;
    return true;
  }
  // Every rank's list of counts is sent first, so that a mismatch is found before data are moved.
  std::uint32_t count_steps() const {
    const std::size_t bytes = size_ * sizeof(std::uint64_t);
    return static_cast<std::uint32_t>((bytes + arena_.stage_slot_bytes() - 1) / arena_.stage_slot_bytes());
  }

  void copy_own_part() {
    const auto move = [&](std::byte* to, const std::byte* from, std::size_t count) {
      if (count != 0 && to != from) std::memmove(to, from, count * element_);
    };
    switch (op_.op) {
      case Op::gather:
      case Op::all_gather:
        if (receives(me_)) move(op_.out + op_.parts.offset(me_) * element_, op_.in, op_.parts.count(me_));
        break;
      case Op::scatter:
        if (me_ == op_.root) move(op_.out, op_.in + op_.parts.offset(me_) * element_, op_.parts.count(me_));
        break;
      case Op::all_to_all:
        move(op_.out + op_.out_parts.offset(me_) * element_, op_.in + op_.in_parts.offset(me_) * element_,
             std::min(op_.in_parts.count(me_), op_.out_parts.count(me_)));
        break;
      default: break;
    }
  }

  // Offset and length of the k-th block in a part of `count` elements.
  std::size_t begin(std::uint32_t k) const { return block_ * k; }
  std::size_t length(std::uint32_t k, std::size_t count) const {
    return begin(k) >= count ? 0 : std::min(block_, count - begin(k));
  }

  void fill(std::uint32_t k) {
    arena_.await_all(Counter::drained, base_ + k + 1 - Arena::kStageSlots, call_.context);
    std::byte* slot = arena_.stage_slot(me_, base_ + k);
    if (exchange_counts_ && k < count_steps()) {
      fill_counts(slot, k);
    } else {
      fill_data(slot, exchange_counts_ ? k - count_steps() : k);
    }
    arena_.set(Counter::filled, base_ + k + 1);
  }

  void fill_data(std::byte* slot, std::uint32_t k) {
    if (!cells_) {
      const std::size_t count = op_.op == Op::broadcast ? op_.count : op_.parts.count(me_);
      if (length(k, count) != 0) std::memcpy(slot, op_.in + begin(k) * element_, length(k, count) * element_);
      return;
    }
    const Parts& parts = op_.op == Op::all_to_all ? op_.in_parts : op_.parts;
    for (int r = 0; r < size_; ++r) {
      const std::size_t count = length(k, parts.count(r));
      if (r == me_ || count == 0) continue;
      std::memcpy(cell(slot, r), op_.in + (parts.offset(r) + begin(k)) * element_, count * element_);
    }
  }

  std::byte* cell(std::byte* slot, int rank) const { return slot + block_ * element_ * rank; }

  void drain(std::uint32_t k) {
    if (exchange_counts_ && k < count_steps()) {
      check_counts(k);
    } else {
      drain_data(k);
    }
    arena_.set(Counter::drained, base_ + k + 1);
  }

  void drain_data(std::uint32_t step) {
    const std::uint32_t k = exchange_counts_ ? step - count_steps() : step;
    if (op_.op == Op::reduce_scatter) return reduce_cells(step);
    for (int i = 1; i < size_; ++i) {
      const int r = (me_ + i) % size_;
      if (!contributes(r)) continue;
      arena_.await(Counter::filled, r, base_ + step + 1, call_.context);
      const std::byte* slot = arena_.stage_slot(r, base_ + step);
      std::size_t offset = 0;
      std::size_t count = op_.count;
      if (op_.op == Op::all_to_all) {
        offset = op_.out_parts.offset(r);
        count = op_.out_parts.count(r);
      } else if (op_.op == Op::scatter) {
        count = op_.parts.count(me_);
      } else if (op_.op != Op::broadcast) {
        offset = op_.parts.offset(r);
        count = op_.parts.count(r);
      }
      const std::size_t now = length(k, count);
      if (now == 0) continue;
      copy_result_(op_.out + (offset + begin(k)) * element_, cells_ ? cell_of(slot) : slot, now * element_);
    }
  }

  const std::byte* cell_of(const std::byte* slot) const { return slot + block_ * element_ * me_; }

  void reduce_cells(std::uint32_t k) {
    arena_.await_all(Counter::filled, base_ + k + 1, call_.context);
    const std::size_t count = length(k, op_.parts.count(me_));
    if (count == 0) return;
    RankList<const void*> sources(size_);
    for (int r = 0; r < size_; ++r) {
      sources[r] =
          r == me_ ? op_.in + (op_.parts.offset(me_) + begin(k)) * element_ : cell_of(arena_.stage_slot(r, base_ + k));
    }
    void* destination = op_.out + begin(k) * element_;
    reduce(reduction_of(op_, call_.size()), sources.span(), {&destination, 1}, count);
  }

  std::size_t counts_per_step() const { return arena_.stage_slot_bytes() / sizeof(std::uint64_t); }

  void fill_counts(std::byte* slot, std::uint32_t k) {
    for (std::size_t i = 0; i < counts_per_step(); ++i) {
      const std::size_t r = counts_per_step() * k + i;
      if (std::cmp_greater_equal(r, size_)) break;
      const std::uint64_t count = op_.in_parts.count(static_cast<int>(r));
      std::memcpy(slot + i * sizeof count, &count, sizeof count);
    }
  }

  void check_counts(std::uint32_t k) {
    arena_.await_all(Counter::filled, base_ + k + 1, call_.context);
    if (me_ / counts_per_step() != k) return;
    for (int r = 0; r < size_; ++r) {
      std::uint64_t theirs = 0;
      std::memcpy(&theirs, arena_.stage_slot(r, base_ + k) + me_ % counts_per_step() * sizeof theirs, sizeof theirs);
      check_arena_count(arena_, r, theirs, op_.out_parts.count(r));
    }
  }

  ArenaCall& call_;
  Arena& arena_;
  const Operation& op_;
  std::uint32_t epoch_;
  std::size_t element_;
  int me_;
  int size_;
  ResultCopy copy_result_;
  bool cells_ = false;
  bool exchange_counts_ = false;
  std::size_t block_ = 0;
  std::uint32_t steps_ = 0;
  std::uint32_t base_ = 0;
};

}  // namespace

void check_arena_count(const Arena& arena, int from, std::size_t sent, std::size_t expected) {
  if (sent == expected) return;
  ErrorInfo info;
  info.ranks = {arena.global_rank(from), arena.global_rank(arena.rank())};
  info.reason = fmt::format("rank {} sends {} elements to rank {}, which expects {}", info.ranks[0], sent,
                            info.ranks[1], expected);
  throw Mismatch(std::move(info));
}

void arena_staged_move(ArenaCall& call, const Operation& op, std::uint32_t epoch) { StagedMove(call, op, epoch).run(); }

}  // namespace maniple
