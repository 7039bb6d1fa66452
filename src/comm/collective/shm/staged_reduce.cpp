// all_reduce and reduce in ordinary memory, through the stages (see arena.h).
//
// The buffer is cut into *chunks* of a slot's size, and a chunk into one *slice* per rank. Each chunk has three phases:
//   fill      copy the slices that other ranks reduce into this rank's slot
//   reduce    reduce this rank's slice in rank order: its own operand directly from its buffer, the others' from their
//             slots. The result goes to its buffer and into its slot, at the place that `fill` left free
//   drain     copy the other slices' results out of their slots
// The phases of consecutive chunks overlap: a rank fills chunk k while other ranks may still reduce k-1 and drain k-2.
//
// Cost per rank and buffer byte: (n-1)/n copied in, 1 read for the reduction, (n-1)/n copied out; all from caches.

#include <cstring>

#include "comm/base/rank_arithmetic.h"
#include "comm/collective/shm/arena_call.h"

namespace maniple {
namespace {

class StagedReduce {
 public:
  StagedReduce(ArenaCall& call, const Operation& op)
      : call_(call), arena_(call.arena), op_(op), element_(op.element()), me_(call.rank()), sources_(call.size()) {
    // In place, the lines have just been read and are cached.
    if (op.in != op.out) copy_result_ = ResultCopy(op.bytes(), op.op == Op::all_reduce ? call.size() : 1);
    // Two chunks suffice for the phases to overlap, and fewer chunks mean fewer waits.
    const std::size_t line = 64 / element_;
    const std::size_t most = arena_.stage_slot_bytes() / element_;
    const std::size_t least = 16384 / element_ * call.size();
    chunk_ = std::min(most, std::max({op.count / 2, least, line}));
    chunk_ = std::max(line, chunk_ / line * line);
    steps_ = static_cast<std::uint32_t>((op.count + chunk_ - 1) / chunk_);
    base_ = arena_.step_base();
  }

  void run() {
    // Filling runs two chunks ahead of draining; kStageSlots bounds how far any rank can be ahead of another.
    for (std::uint32_t k = 0; k < steps_ + 2; ++k) {
      if (k < steps_) fill(k);
      if (k >= 1 && k - 1 < steps_) reduce_slice(k - 1);
      if (k >= 2) drain(k - 2);
    }
    arena_.advance_steps(steps_);
  }

 private:
  bool wants_result() const { return op_.op == Op::all_reduce || me_ == op_.root; }
  std::size_t first(std::uint32_t k) const { return chunk_ * k; }
  std::size_t length(std::uint32_t k) const { return std::min(chunk_, op_.count - first(k)); }
  Slices slices(std::uint32_t k) const { return {length(k), element_, call_.size()}; }

  void fill(std::uint32_t k) {
    arena_.await_all(Counter::drained, base_ + k + 1 - Arena::kStageSlots, call_.context);
    std::byte* slot = arena_.stage_slot(me_, base_ + k);
    const std::byte* source = op_.in + first(k) * element_;
    const Slices cut = slices(k);
    const std::size_t before = cut.begin(me_) * element_;
    const std::size_t after = cut.end(me_) * element_;
    if (before != 0) std::memcpy(slot, source, before);
    if (length(k) * element_ > after) std::memcpy(slot + after, source + after, length(k) * element_ - after);
    arena_.set(Counter::filled, base_ + k + 1);
  }

  void reduce_slice(std::uint32_t k) {
    const Slices cut = slices(k);
    const std::size_t begin = cut.begin(me_) * element_;
    arena_.await_all(Counter::filled, base_ + k + 1, call_.context);
    if (cut.size(me_) != 0) {
      for (int r = 0; r < call_.size(); ++r) {
        sources_[r] = r == me_ ? op_.in + first(k) * element_ + begin : arena_.stage_slot(r, base_ + k) + begin;
      }
      void* destinations[2] = {arena_.stage_slot(me_, base_ + k) + begin, nullptr};
      if (wants_result()) destinations[1] = op_.out + first(k) * element_ + begin;
      reduce(reduction_of(op_, call_.size()), sources_.span(), {destinations, wants_result() ? 2U : 1U}, cut.size(me_));
    }
    arena_.set(Counter::reduced, base_ + k + 1);
  }

  void drain(std::uint32_t k) {
    if (wants_result()) {
      const Slices cut = slices(k);
      for (int i = 1; i < call_.size(); ++i) {
        const int r = (me_ + i) % call_.size();
        arena_.await(Counter::reduced, r, base_ + k + 1, call_.context);
        const std::size_t begin = cut.begin(r) * element_;
        if (cut.size(r) != 0) {
          copy_result_(op_.out + first(k) * element_ + begin, arena_.stage_slot(r, base_ + k) + begin,
                       cut.size(r) * element_);
        }
      }
    }
    arena_.set(Counter::drained, base_ + k + 1);
  }

  ArenaCall& call_;
  Arena& arena_;
  const Operation& op_;
  std::size_t element_;
  int me_;
  RankList<const void*> sources_;
  ResultCopy copy_result_;
  std::size_t chunk_ = 0;
  std::uint32_t steps_ = 0;
  std::uint32_t base_ = 0;
};

}  // namespace

void arena_staged_reduce(ArenaCall& call, const Operation& op) { StagedReduce(call, op).run(); }

}  // namespace maniple
