// Registered memory: every rank reads, and for all_reduce and reduce also writes, the others' buffers where they lie.
//
// A *slice* is the part of the buffer that one rank reduces. all_reduce: each rank reduces its slice out of all ranks' memory,
// in rank order, and writes it to all of them. Cost: two synchronisations; each byte of each buffer is read once and written once; n
// ranks share the work evenly. Operations that only move bytes pull them from the contributor.
//
// The second synchronisation (`finished`) keeps a rank from returning while a peer still reads its buffer.

#include <cstring>

#include "base/rank_arithmetic.h"
#include "collective/shm/arena_call.h"

namespace maniple {
namespace {

class Direct {
 public:
  Direct(ArenaCall& call, const Operation& op, std::uint32_t epoch)
      : call_(call), op_(op), epoch_(epoch), inputs_(call.size()), outputs_(call.size()) {}

  bool run() {
    if (!resolve()) return false;
    switch (op_.op) {
      case Op::all_reduce: all_reduce(); break;
      case Op::reduce: reduce_to_root(); break;
      case Op::reduce_scatter: reduce_range(op_.parts.offset(me()), op_.parts.count(me()), op_.out); break;
      case Op::broadcast:
        if (me() != op_.root) copy(op_.out, inputs_[op_.root], op_.bytes());
        break;
      case Op::scatter:
        copy(op_.out, inputs_[op_.root] + op_.parts.offset(me()) * element(), op_.parts.count(me()) * element());
        break;
      case Op::gather:
      case Op::all_gather:
        if (op_.op == Op::all_gather || me() == op_.root) collect();
        break;
      case Op::all_to_all:
        for (int r : others_and_me()) {
          copy(op_.out + op_.out_parts.offset(r) * element(), inputs_[r] + op_.in_parts.offset(me()) * element(),
               op_.out_parts.count(r) * element());
        }
        break;
      default: return false;
    }
    call_.arena.set(Counter::finished, epoch_);
    call_.context.forget_ticks();  // the wait for the contributions was neither the end nor just now
    call_.arena.await_all(Counter::finished, epoch_, call_.context);
    return true;
  }

 private:
  int me() const { return call_.rank(); }
  int size() const { return call_.size(); }
  std::size_t element() const { return op_.element(); }
  const Contribution::Refs& refs(int rank) { return call_.arena.contribution(rank, epoch_).refs(); }

  // All ranks read the same contributions, so all decide alike.
  bool resolve() {
    const bool only_root = op_.op == Op::broadcast || op_.op == Op::scatter;
    if (op_.op == Op::all_to_all && !(op_.in_parts.equal() && op_.out_parts.equal())) return false;
    for (int r = 0; r < size(); ++r) {
      if (only_root && r != op_.root) continue;
      if (refs(r).in.segment == 0 && input_bytes(r) != 0) return false;
      if (op_.op == Op::all_reduce && refs(r).out.segment == 0) return false;
    }
    if (op_.op == Op::reduce && refs(op_.root).out.segment == 0) return false;
    for (int r = 0; r < size(); ++r) {
      if (only_root && r != op_.root) continue;
      inputs_[r] = input_bytes(r) == 0 ? nullptr : call_.registered.resolve(refs(r).in, input_bytes(r));
      if (op_.op == Op::all_reduce || (op_.op == Op::reduce && r == op_.root)) {
        outputs_[r] = call_.registered.resolve(refs(r).out, op_.bytes());
      }
    }
    return true;
  }

  std::size_t input_bytes(int rank) const {
    switch (op_.op) {
      case Op::gather:
      case Op::all_gather: return op_.parts.count(rank) * element();
      case Op::scatter:
      case Op::reduce_scatter: return op_.parts.total() * element();
      case Op::all_to_all: return op_.in_parts.total() * element();
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

  void collect() {
    for (int r : others_and_me()) {
      copy(op_.out + op_.parts.offset(r) * element(), inputs_[r], op_.parts.count(r) * element());
    }
  }

  // Each rank starts with the next one, so that they do not all read the same memory at once.
  std::vector<int> others_and_me() const {
    std::vector<int> order;
    for (int i = 1; i <= size(); ++i) order.push_back((me() + i) % size());
    return order;
  }

  static void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
  }

  ArenaCall& call_;
  const Operation& op_;
  std::uint32_t epoch_;
  RankList<std::byte*> inputs_;
  RankList<std::byte*> outputs_;
};

}  // namespace

bool arena_direct(ArenaCall& call, const Operation& op, std::uint32_t epoch) {
  if (call.forced == "staged" || op.op == Op::barrier) return false;
  return Direct(call, op, epoch).run();
}

}  // namespace maniple
