// How a collective in shared memory begins: ranks post what they call, meet, compare, and take the fitting algorithm.
//
// Every operation, rooted or not, starts with this meeting of all ranks. It costs one cache line per rank and is what makes
// the comparison complete and the reuse of posts safe (see arena.h).

#include <algorithm>
#include <cstring>

#include "collective/arena_call.h"
#include "collective/signature.h"

namespace maniple {
namespace {

enum Mode : std::uint32_t { kInline, kReferences };

// Redundant work of the inline algorithm grows with the ranks, so its limit shrinks.
std::size_t inline_limit(int size) noexcept {
  return size <= 4 ? Post::kPayload : std::max<std::size_t>(1024, 4 * Post::kPayload / static_cast<std::size_t>(size));
}

// What this rank puts into its post.
std::span<const std::byte> contribution(const Operation& op, int rank) noexcept {
  switch (op.op) {
    case Op::broadcast: return rank == op.root ? std::span(op.in, op.bytes()) : std::span<const std::byte>();
    case Op::reduce:
    case Op::all_reduce: return {op.in, op.bytes()};
    case Op::gather:
    case Op::all_gather: return {op.in, op.parts.count(rank) * op.element()};
    case Op::scatter: return rank == op.root ? std::span(op.in, op.parts.total() * op.element()) : std::span<const std::byte>();
    case Op::reduce_scatter: return {op.in, op.parts.total() * op.element()};
    case Op::all_to_all: return {op.in, op.in_parts.total() * op.element()};
    default: return {};
  }
}

std::span<const std::byte> result(const Operation& op, int rank) noexcept {
  switch (op.op) {
    case Op::broadcast:
    case Op::all_reduce: return {op.out, op.bytes()};
    case Op::reduce: return {op.out, rank == op.root ? op.bytes() : 0};
    default: return {};  // other operations only read each other's memory
  }
}

void post_references(ArenaCall& call, const Operation& op, Post& mine) {
  mine.mode = kReferences;
  Post::Refs refs{};
  if (!call.registered.empty() && call.forced != "staged") {
    const auto in = contribution(op, call.rank());
    const auto out = result(op, call.rank());
    if (!in.empty()) refs.in = call.registered.find(in.data(), in.size());
    if (!out.empty()) refs.out = call.registered.find(out.data(), out.size());
  }
  refs.extra = op.op == Op::all_to_all ? op.in_parts.largest() : 0;
  mine.refs() = refs;
}

}  // namespace

std::size_t largest_contribution(const Operation& op) noexcept {
  switch (op.op) {
    case Op::barrier: return 0;
    case Op::gather:
    case Op::all_gather: return op.parts.largest() * op.element();
    case Op::scatter:
    case Op::reduce_scatter: return op.parts.total() * op.element();
    case Op::all_to_all: return op.in_parts.total() * op.element();
    default: return op.bytes();
  }
}

void run_in_arena(ArenaCall& call, const Operation& op) {
  Arena& arena = call.arena;
  const std::uint32_t epoch = arena.next_epoch();
  arena.check_raised(epoch);
  Post& mine = arena.post(call.rank(), epoch);
  mine.words = {call.signature.seq, call.signature.what, call.signature.count, call.signature.detail};

  const bool uneven_all_to_all = op.op == Op::all_to_all && !(op.in_parts.equal() && op.out_parts.equal());
  const bool small = !uneven_all_to_all && largest_contribution(op) <= inline_limit(call.size());
  if (small) {
    mine.mode = kInline;
    const auto bytes = contribution(op, call.rank());
    if (!bytes.empty()) std::memcpy(mine.payload, bytes.data(), bytes.size());
  } else {
    post_references(call, op, mine);
  }
  arena.publish(epoch);
  arena.await_posts(epoch, call.patience);
  arena.check_raised(epoch);  // a rank that comes after the others gave up finds their posts, but they are gone

  if (call.compare) {
    bool same = true;
    for (int r = 0; r < call.size(); ++r) {
      const Post& theirs = arena.post(r, epoch);
      same &= theirs.words == mine.words && theirs.mode == mine.mode;
    }
    if (!same) [[unlikely]] arena_mismatch(call, op, epoch);
  }
  if (small) {
    arena_inline(call, op, epoch);
  } else if (!arena_direct(call, op, epoch)) {
    if (op.op == Op::all_reduce || op.op == Op::reduce) {
      arena_staged_reduce(call, op);
    } else {
      arena_staged_move(call, op, epoch);
    }
  }
  arena.finish_epoch(epoch);
}

void run_alone(const Operation& op) {
  const auto copy = [&](std::size_t count) {
    if (count != 0 && op.in != op.out) std::memmove(op.out, op.in, count * op.element());
  };
  switch (op.op) {
    case Op::reduce:
    case Op::all_reduce:
    case Op::reduce_scatter: {
      const std::size_t count = op.op == Op::reduce_scatter ? op.parts.count(0) : op.count;
      if (count == 0) return;
      const void* source = op.in;
      void* destination = op.out;
      reduce(reduction_of(op, 1), {&source, 1}, {&destination, 1}, count);
      return;
    }
    case Op::gather:
    case Op::all_gather:
    case Op::scatter: return copy(op.parts.count(0));
    case Op::all_to_all: return copy(op.in_parts.count(0));
    default: return;
  }
}

}  // namespace maniple
