// How a collective in shared memory begins: ranks post what they call, meet, compare, and take the fitting algorithm.
//
// Every operation, rooted or not, starts with this meeting of all ranks. It costs one cache line per rank and is what makes
// the comparison complete and the reuse of posts safe (see arena.h).

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/ticks.h"
#include "collective/shm/arena_call.h"
#include "call/signature.h"

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

Post::Refs references(const ArenaCall& call, const Operation& op) {
  Post::Refs refs{};
  if (!call.registered.empty() && call.forced != "staged") {
    const auto in = contribution(op, call.rank());
    const auto out = result(op, call.rank());
    if (!in.empty()) refs.in = call.registered.find(in.data(), in.size());
    if (!out.empty()) refs.out = call.registered.find(out.data(), out.size());
  }
  refs.extra = op.op == Op::all_to_all ? op.in_parts.largest() : 0;
  return refs;
}

// Registered memory that would fit a post, but is reduced faster where it lies. Each rank decides for its own.
bool worth_direct(const Operation& op) noexcept { return op.op == Op::all_reduce && op.bytes() > 2048; }

// Gets the lines of the next post back from those who read it two epochs ago, and by now have: it is likely as long as this one.
void prepare_post(const Post& post, std::size_t payload) noexcept {
  constexpr std::size_t kMost = 2048;  // more requests at once than the core can have under way only delay it
  const auto* first = reinterpret_cast<const std::byte*>(&post);
  for (std::size_t at = 0; at < offsetof(Post, payload) + std::min(payload, kMost); at += 64) fetch_to_write(first + at);
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
  const bool fits = !uneven_all_to_all && largest_contribution(op) <= inline_limit(call.size());
  Post::Refs refs{};
  if (!fits || worth_direct(op)) refs = references(call, op);
  const bool with_post = fits && !(refs.in.segment != 0 && refs.out.segment != 0);
  mine.mode = with_post ? kInline : kReferences;
  if (with_post) {
    const auto bytes = contribution(op, call.rank());
    if (!bytes.empty()) std::memcpy(mine.payload, bytes.data(), bytes.size());
  } else {
    mine.refs() = refs;
  }
  arena.publish(epoch);
  call.context.posted();
  arena.await_posts(epoch, call.context);
  prepare_post(arena.post(call.rank(), epoch + 1), with_post ? largest_contribution(op) : 0);
  arena.check_raised(epoch);  // a rank that comes after the others gave up finds their posts, but they are gone

  if (call.compare) {
    std::uint64_t difference = 0;
    for (int r = 0; r < call.size(); ++r) {
      const Post& theirs = arena.post(r, epoch);
      difference |= (theirs.words[0] ^ call.signature.seq) | (theirs.words[1] ^ call.signature.what) |
                    (theirs.words[2] ^ call.signature.count) | (theirs.words[3] ^ call.signature.detail);
    }
    if (difference != 0) [[unlikely]] arena_mismatch(call, op, epoch);
  }
  int posted = fits ? call.size() : 0;  // ranks whose bytes came with their posts
  if (fits && worth_direct(op)) {
    posted = 0;
    for (int r = 0; r < call.size(); ++r) posted += arena.post(r, epoch).mode == kInline ? 1 : 0;
  }
  if (posted == call.size()) {
    arena_inline(call, op, epoch);
  } else if (posted != 0 || !arena_direct(call, op, epoch)) {
    if (op.op == Op::all_reduce || op.op == Op::reduce) {
      arena_staged_reduce(call, op);
    } else {
      arena_staged_move(call, op, epoch);
    }
    call.context.forget_ticks();  // there was more to do after the last wait
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
