// Small operations: the bytes came with the posts.
//
// Cost: one meeting; each rank reads the posts it needs. Reductions are done by every rank for itself, in rank order, so all
// ranks hold the same bits without a second meeting.

#include <cstring>

#include "collective/shm/arena_call.h"
#include "call/rank_list.h"

namespace maniple {
namespace {

void reduce_posts(ArenaCall& call, const Operation& op, std::uint32_t epoch, std::size_t offset, std::size_t count) {
  if (count == 0) return;
  RankList<const void*> sources(call.size());
  for (int r = 0; r < call.size(); ++r) sources[r] = call.arena.post(r, epoch).payload + offset;
  void* destination = op.out;
  reduce(reduction_of(op, call.size()), sources.span(), {&destination, 1}, count);
}

void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

}  // namespace

void arena_inline(ArenaCall& call, const Operation& op, std::uint32_t epoch) {
  const std::size_t element = op.element();
  const int me = call.rank();
  const auto payload = [&](int rank) -> const std::byte* { return call.arena.post(rank, epoch).payload; };
  switch (op.op) {
    case Op::all_reduce: return reduce_posts(call, op, epoch, 0, op.count);
    case Op::reduce:
      if (me == op.root) reduce_posts(call, op, epoch, 0, op.count);
      return;
    case Op::reduce_scatter: return reduce_posts(call, op, epoch, op.parts.offset(me) * element, op.parts.count(me));
    case Op::broadcast:
      if (me != op.root) copy(op.out, payload(op.root), op.bytes());
      return;
    case Op::scatter: return copy(op.out, payload(op.root) + op.parts.offset(me) * element, op.parts.count(me) * element);
    case Op::gather:
    case Op::all_gather:
      if (op.op == Op::gather && me != op.root) return;
      for (int r = 0; r < call.size(); ++r) {
        copy(op.out + op.parts.offset(r) * element, payload(r), op.parts.count(r) * element);
      }
      return;
    case Op::all_to_all:
      for (int r = 0; r < call.size(); ++r) {
        copy(op.out + op.out_parts.offset(r) * element, payload(r) + op.in_parts.offset(me) * element,
             op.out_parts.count(r) * element);
      }
      return;
    default: return;  // barrier: the meeting was all
  }
}

}  // namespace maniple
