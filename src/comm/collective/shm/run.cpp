// Collectives in shared memory: ranks publish their contributions, wait for the ranks they read from, compare their
// calls, and select an algorithm. The algorithm for small operations is here, too.
//
// In most operations every rank waits for all others. In small rooted ones only receivers wait: in reduce and gather
// the root for all, in broadcast and scatter the others for the root. Ranks that only send continue at once, and may
// get some operations ahead (see `window` in arena.h).
//
// A rank compares its own call with the call of each rank it waits for. Two ranks that only send may make different
// calls without waiting for each other; so a contribution also carries a hash of all calls so far, and the next
// comparison, in the next window at the latest, reveals the difference.

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "comm/base/ticks.h"
#include "comm/collective/shm/arena_call.h"

namespace maniple {
namespace {

// kPlace: not a call. The rank has found a mismatch and publishes its own call's place; the payload's length is the
// mode minus kPlace.
enum Mode : std::uint32_t { kInline, kReferences, kPlace };

enum class Awaits { all, root, none };

// The ranks whose contributions this rank reads or must wait for.
Awaits awaited_in(const Operation& op, int rank) noexcept {
  switch (op.op) {
    case Op::broadcast:
    case Op::scatter: return rank == op.root ? Awaits::none : Awaits::root;
    case Op::reduce:
    case Op::gather: return rank == op.root ? Awaits::all : Awaits::none;
    default: return Awaits::all;
  }
}

// The factors are odd, so that multiplication never cancels a difference.
std::uint64_t history_of(std::uint64_t before, const Signature& call) noexcept {
  return before * 0x9e3779b97f4a7c15 + call.seq + call.what * 0xbf58476d1ce4e5b9 + call.count * 0x94d049bb133111eb +
         call.detail * 0xd6e8feb86659fd93;
}

// This rank's bytes for the other ranks.
std::span<const std::byte> input_of(const Operation& op, int rank) noexcept {
  switch (op.op) {
    case Op::broadcast: return rank == op.root ? std::span(op.in, op.bytes()) : std::span<const std::byte>();
    case Op::reduce:
    case Op::all_reduce: return {op.in, op.bytes()};
    case Op::gather:
    case Op::all_gather: return {op.in, op.parts.count(rank) * op.element()};
    case Op::scatter:
      return rank == op.root ? std::span(op.in, op.parts.total() * op.element()) : std::span<const std::byte>();
    case Op::reduce_scatter: return {op.in, op.parts.total() * op.element()};
    case Op::all_to_all: return {op.in, op.in_parts.total() * op.element()};
    default: return {};
  }
}

std::span<const std::byte> output_of(const Operation& op, int rank) noexcept {
  switch (op.op) {
    case Op::broadcast:
    case Op::all_reduce: return {op.out, op.bytes()};
    case Op::reduce: return {op.out, rank == op.root ? op.bytes() : 0};
    case Op::gather: return {op.out, rank == op.root ? op.parts.total() * op.element() : 0};
    default: return {};  // in other operations ranks only read other ranks' memory
  }
}

// Ordinary memory in operations that only move bytes can be read from its process: one copy by the kernel instead of
// two by the ranks through the stage.
bool can_be_read(const ArenaCall& call, Op op) noexcept {
  const bool moves =
      op == Op::broadcast || op == Op::scatter || op == Op::gather || op == Op::all_gather || op == Op::all_to_all;
  return moves && call.arena.reads_peers() && call.forced != "staged";
}

// Measured at run time (see faster_way.h). The operations below start with reading: every byte has one reader, and the
// ranks read in parallel, each on its own core, instead of going through one rank, or through twice as much memory.
enum Way : int { kRead, kStage };
Way way_at_first(Op op, int ranks) noexcept {
  return op == Op::all_to_all || (op == Op::scatter && ranks >= 4) ? kRead : kStage;
}

Contribution::Refs references(const ArenaCall& call, const Operation& op) {
  Contribution::Refs refs{};
  if (!call.registered.empty() && call.forced != "staged") {
    const auto in = input_of(op, call.rank());
    const auto out = output_of(op, call.rank());
    if (!in.empty()) refs.in = call.registered.find(in.data(), in.size());
    if (!out.empty()) refs.out = call.registered.find(out.data(), out.size());
  }
  if (refs.in.segment == 0 && can_be_read(call, op.op)) {
    const auto in = input_of(op, call.rank());
    if (!in.empty()) refs.in = {SharedRef::kProcess, reinterpret_cast<std::uint64_t>(in.data())};
  }
  refs.extra = op.op == Op::all_to_all ? op.in_parts.largest() : 0;
  return refs;
}

// Registered memory that would fit a contribution, but is reduced faster in place. Each rank decides for its own
// memory.
bool worth_direct(const Operation& op) noexcept { return op.op == Op::all_reduce && op.bytes() > 2048; }

// Fetches the next contribution's cache lines back from ranks that read them some epochs ago and have finished. Assumes
// that it is as long as this one.
void prefetch(Arena& arena, std::uint32_t next, std::size_t payload) noexcept {
  constexpr std::size_t kMax = 2048;  // more requests than the core can have in flight only delay it
  constexpr std::size_t kLine = 64;
  const auto* first = reinterpret_cast<const std::byte*>(&arena.contribution(arena.rank(), next));
  fetch_to_write(first);
  if (offsetof(Contribution, payload) + payload <= kLine) return;
  fetch_to_write(first + kLine);
  if (payload <= Contribution::kSmallPayload) return;
  const std::byte* large = arena.payload(arena.rank(), next, payload);
  for (std::size_t at = 0; at < std::min(payload, kMax); at += kLine) fetch_to_write(large + at);
}

// A rank that published this epoch before this rank waited for it is ahead, so its next contribution is probably there,
// too, and is prefetched.
void prefetch_if_ahead(Arena& arena, int rank, std::uint32_t epoch, std::size_t payload) noexcept {
  if (!arena.has_published(rank, epoch)) return;  // prefetching now would steal the line from its writer
  const auto* first = reinterpret_cast<const std::byte*>(&arena.contribution(rank, epoch + 1));
  __builtin_prefetch(first);
  if (offsetof(Contribution, payload) + payload > 64) __builtin_prefetch(first + 64);
}

void reduce_contributions(ArenaCall& call, const Operation& op, std::uint32_t epoch, std::size_t largest,
                          std::size_t offset, std::size_t count) {
  if (count == 0) return;
  RankList<const void*> sources(call.size());
  for (int r = 0; r < call.size(); ++r) sources[r] = call.arena.payload(r, epoch, largest) + offset;
  void* destination = op.out;
  reduce(reduction_of(op, call.size()), sources.span(), {&destination, 1}, count);
}

void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

// The algorithm for small operations: the contributions hold the bytes. One synchronisation; each rank reads the bytes
// it needs. Every rank reduces by itself, in rank order, so all get the same bits without a second synchronisation.
void run_inline(ArenaCall& call, const Operation& op, std::uint32_t epoch, std::size_t largest) {
  const std::size_t element = op.element();
  const int me = call.rank();
  const auto payload = [&](int rank) -> const std::byte* { return call.arena.payload(rank, epoch, largest); };
  switch (op.op) {
    case Op::all_reduce: return reduce_contributions(call, op, epoch, largest, 0, op.count);
    case Op::reduce:
      if (me == op.root) reduce_contributions(call, op, epoch, largest, 0, op.count);
      return;
    case Op::reduce_scatter:
      return reduce_contributions(call, op, epoch, largest, op.parts.offset(me) * element, op.parts.count(me));
    case Op::broadcast:
      if (me != op.root) copy(op.out, payload(op.root), op.bytes());
      return;
    case Op::scatter:
      return copy(op.out, payload(op.root) + op.parts.offset(me) * element, op.parts.count(me) * element);
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
    default: return;  // barrier: only synchronises
  }
}

bool same_call(const Contribution& a, const Contribution& b) noexcept { return a.words == b.words; }

// Ranks that made different calls exchange the places of these calls in one more synchronisation, with a short time
// limit of its own. A call of a rank that does not take part (it has continued, died, or does not compare) has no
// place. Returns whether all took part.
bool exchange_places(ArenaCall& call, const Operation& op, OperationContext& short_wait, std::vector<RankCall>& calls) {
  Arena& arena = call.arena;
  const std::uint32_t second = arena.next_epoch();
  Contribution& mine = arena.contribution(call.rank(), second);
  const std::string place = place_text(op.where.file_name(), op.where.line());  // empty: an internal call
  const std::size_t length = std::min(place.size(), arena.payload_bytes());
  mine.words.fill(~std::uint64_t{0});  // matches no call
  mine.mode = kPlace + static_cast<std::uint32_t>(length);
  std::memcpy(arena.payload(call.rank(), second, arena.payload_bytes()), place.data(), length);
  arena.publish(second);
  bool complete = true;
  for (RankCall& theirs : calls) {
    int r = 0;
    while (arena.global_rank(r) != theirs.rank) ++r;
    try {
      if (r != call.rank()) arena.await_contribution(r, second, short_wait);
      const std::uint32_t mode = arena.contribution(r, second).mode;
      if (mode >= kPlace) {
        theirs.place.assign(reinterpret_cast<const char*>(arena.payload(r, second, arena.payload_bytes())),
                            std::min<std::size_t>(mode - kPlace, arena.payload_bytes()));
        continue;
      }
    } catch (const Error&) {  // leaves the call without a place
    }
    complete = false;
  }
  return complete;
}

// The contributions to this epoch differ in the call or in the hash. Throws a Mismatch with each rank's call in the
// first epoch that differs.
[[noreturn]] void throw_mismatch(ArenaCall& call, const Operation& op, std::uint32_t epoch) {
  Arena& arena = call.arena;
  const int me = call.rank();
  for (int r = 0; r < call.size(); ++r) {
    if (!arena.has_published(r, epoch) || arena.contribution(r, epoch).mode < kPlace) continue;
    try {
      arena.await_raised();
    } catch (const PeerLost&) {
      break;  // the rank raised its Mismatch only in its own process, and has ended since
    }
  }
  const auto differs = [&](std::uint32_t at) {
    for (int r = 0; r < call.size(); ++r) {
      if (arena.has_published(r, epoch) && !same_call(arena.contribution(r, at), arena.contribution(me, at)))
        return true;
    }
    return false;
  };
  // Earlier epochs have been compared and may be overwritten.
  std::uint32_t first = arena.epoch() - 2 * Arena::kWindow + 1;
  while (first != epoch && !differs(first)) ++first;

  OperationContext short_wait(std::chrono::milliseconds(500));
  std::vector<RankCall> calls;
  for (int r = 0; r < call.size(); ++r) {
    try {
      if (r != me) arena.await_contribution(r, first, short_wait);
      const auto& words = arena.contribution(r, first).words;
      const Signature theirs{words[0], words[1], words[2], words[3]};
      calls.push_back({.rank = arena.global_rank(r), .call = theirs.describe()});
    } catch (const Error&) {  // the rank has not reached that epoch
    }
  }
  const bool complete = first == arena.epoch() && exchange_places(call, op, short_wait, calls);
  ErrorInfo info = mismatch_of(std::move(calls));
  if (!complete) info.sequence = arena.contribution(me, first).words[0];  // the ranks' recorders have the places
  throw Mismatch(std::move(info));
}

// In an uneven all_to_all only the sender knows its counts, so it publishes them unless the list is too long.
void publish_counts(Arena& arena, const Operation& op, std::uint32_t epoch) {
  if (!arena_holds_counts(arena)) return;
  auto* counts = reinterpret_cast<std::uint64_t*>(arena.payload(arena.rank(), epoch, arena.payload_bytes()));
  for (int r = 0; r < arena.size(); ++r) counts[r] = op.in_parts.count(r);
}

// From this size an operation takes long enough that two ranks on one core should separate (Arena::leave_core_of).
constexpr std::size_t kLong = std::size_t{4} << 20;

// Maximum bytes that a rank contributes, the same on all ranks (except in an uneven all_to_all, where ranks do not know
// it).
std::size_t largest_input(const Operation& op) noexcept {
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

}  // namespace

namespace {

// Compares this rank's call with the calls of the ranks it waited for.
void compare_calls(ArenaCall& call, const Operation& op, std::uint32_t epoch, Awaits awaited) {
  const Contribution& mine = call.arena.contribution(call.rank(), epoch);
  std::uint64_t difference = 0;
  const auto compare_with = [&](int rank) {
    const Contribution& theirs = call.arena.contribution(rank, epoch);
    difference |= (theirs.words[0] ^ mine.words[0]) | (theirs.words[1] ^ mine.words[1]) |
                  (theirs.words[2] ^ mine.words[2]) | (theirs.words[3] ^ mine.words[3]) |
                  (theirs.history ^ mine.history);
  };
  if (awaited == Awaits::root) {
    compare_with(op.root);
  } else {
    for (int r = 0; r < call.size(); ++r) compare_with(r);
  }
  if (difference != 0) [[unlikely]]
    throw_mismatch(call, op, epoch);
}

// A rank that only sends must not get too far ahead, and must compare calls now and then.
void await_window(ArenaCall& call, const Operation& op, std::uint32_t epoch) {
  const std::uint32_t before = epoch - Arena::kWindow;
  call.arena.await_contributions(before, call.context);
  call.context.forget_ticks();
  if (call.compare) compare_calls(call, op, before, Awaits::all);
}

}  // namespace

void run_in_arena(ArenaCall& call, const Operation& op) {
  Arena& arena = call.arena;
  const std::uint32_t epoch = arena.next_epoch();
  arena.check_raised(epoch);
  Contribution& mine = arena.contribution(call.rank(), epoch);
  mine.words = {call.signature.seq, call.signature.what, call.signature.count, call.signature.detail};
  mine.history = history_of(arena.contribution(call.rank(), epoch - 1).history, call.signature);

  const bool uneven_all_to_all = op.op == Op::all_to_all && !(op.in_parts.equal() && op.out_parts.equal());
  const std::size_t largest = largest_input(op);
  const bool fits = !uneven_all_to_all && largest <= arena.payload_bytes();
  Contribution::Refs refs{};
  if (!fits || worth_direct(op)) refs = references(call, op);
  FasterWay* choice = nullptr;  // only on the choosing rank
  if (!fits && can_be_read(call, op.op) && call.forced != "direct" && call.rank() == arena_chooser(op)) {
    choice = &arena.faster_way(static_cast<int>(op.op), largest);
    refs.staged = choice->next(way_at_first(op.op, call.size())) == kStage ? 1 : 0;
  }
  const bool has_payload = fits && !(refs.in.segment != 0 && refs.out.segment != 0);
  mine.mode = has_payload ? kInline : kReferences;
  if (has_payload) {
    const auto bytes = input_of(op, call.rank());
    if (!bytes.empty()) std::memcpy(arena.payload(call.rank(), epoch, largest), bytes.data(), bytes.size());
  } else {
    mine.refs() = refs;
    if (uneven_all_to_all) publish_counts(arena, op, epoch);
  }
  if (largest >= kLong) arena.show_core_in(epoch);
  arena.publish(epoch);
  call.context.contribution_published();
  const Awaits awaited = fits ? awaited_in(op, call.rank()) : Awaits::all;
  if (awaited == Awaits::all) {
    if (fits && (op.op == Op::reduce || op.op == Op::gather)) {
      for (int r = 0; r < call.size(); ++r) {
        if (r != call.rank()) prefetch_if_ahead(arena, r, epoch, largest);
      }
    }
    arena.await_contributions(epoch, call.context);
  } else if (awaited == Awaits::root) {
    prefetch_if_ahead(arena, op.root, epoch, largest);
    arena.await_contribution(op.root, epoch, call.context);
  }
  prefetch(arena, epoch + 1, has_payload ? largest : 0);
  if (awaited != Awaits::none) {
    // A late rank may find contributions of ranks that have failed and gone since.
    arena.check_raised(epoch);
    if (call.compare) compare_calls(call, op, epoch, awaited);
  }

  const std::uint64_t arrived_at = choice != nullptr && arena_has_choice(call, op, epoch) ? ticks() : 0;
  int with_payload = fits ? call.size() : 0;  // number of ranks whose contributions hold their bytes
  if (fits && worth_direct(op)) {
    with_payload = 0;
    for (int r = 0; r < call.size(); ++r) with_payload += arena.contribution(r, epoch).mode == kInline ? 1 : 0;
  }
  if (with_payload == call.size()) {
    if (awaited != Awaits::none || op.op == Op::scatter) run_inline(call, op, epoch, largest);
  } else if (with_payload != 0 || !arena_direct(call, op, epoch)) {
    if (op.op == Op::all_reduce || op.op == Op::reduce) {
      arena_staged_reduce(call, op);
    } else {
      arena_staged_move(call, op, epoch);
    }
    call.context.forget_ticks();  // the timestamp is stale: work followed the last wait
  }
  if (arrived_at != 0)
    choice->add(static_cast<double>(ticks() - arrived_at) / static_cast<double>(std::max<std::size_t>(largest, 1)));
  if (awaited != Awaits::all && arena.is_ahead(epoch)) [[unlikely]]
    await_window(call, op, epoch);
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
