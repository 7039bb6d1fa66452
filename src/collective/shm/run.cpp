// Collectives in shared memory: ranks publish their contributions, wait for those of all, compare what they called, and take the
// algorithm that fits. The one for small operations is here, too.
//
// Every operation, rooted or not, starts with this synchronisation of all ranks. It costs one cache line per rank and is what
// makes the comparison complete and the reuse of contributions safe (see arena.h).

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/ticks.h"
#include "collective/shm/arena_call.h"

namespace maniple {
namespace {

enum Mode : std::uint32_t { kInline, kReferences };

// Redundant work of the inline algorithm grows with the ranks, so its limit shrinks.
std::size_t inline_limit(int size) noexcept {
  return size <= 4 ? Contribution::kPayload
                   : std::max<std::size_t>(1024, 4 * Contribution::kPayload / static_cast<std::size_t>(size));
}

// What this rank gives to the others.
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
    default: return {};  // other operations only read each other's memory
  }
}

Contribution::Refs references(const ArenaCall& call, const Operation& op) {
  Contribution::Refs refs{};
  if (!call.registered.empty() && call.forced != "staged") {
    const auto in = input_of(op, call.rank());
    const auto out = output_of(op, call.rank());
    if (!in.empty()) refs.in = call.registered.find(in.data(), in.size());
    if (!out.empty()) refs.out = call.registered.find(out.data(), out.size());
  }
  refs.extra = op.op == Op::all_to_all ? op.in_parts.largest() : 0;
  return refs;
}

// Registered memory that would fit a contribution, but is reduced faster where it lies. Each rank decides for its own.
bool worth_direct(const Operation& op) noexcept { return op.op == Op::all_reduce && op.bytes() > 2048; }

// Fetches the cache lines of the next contribution back from the ranks that read it two epochs ago, and have finished: it is likely
// as long as this one.
void prefetch(const Contribution& next, std::size_t payload) noexcept {
  constexpr std::size_t kMost = 2048;  // more requests at once than the core can have under way only delay it
  const auto* first = reinterpret_cast<const std::byte*>(&next);
  for (std::size_t at = 0; at < offsetof(Contribution, payload) + std::min(payload, kMost); at += 64)
    fetch_to_write(first + at);
}

void reduce_contributions(ArenaCall& call, const Operation& op, std::uint32_t epoch, std::size_t offset,
                          std::size_t count) {
  if (count == 0) return;
  RankList<const void*> sources(call.size());
  for (int r = 0; r < call.size(); ++r) sources[r] = call.arena.contribution(r, epoch).payload + offset;
  void* destination = op.out;
  reduce(reduction_of(op, call.size()), sources.span(), {&destination, 1}, count);
}

void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

// The algorithm for small operations: the bytes are in the contributions. One synchronisation; each rank reads those that it
// needs. Every rank reduces for itself, in rank order, so all hold the same bits without a second synchronisation.
void run_inline(ArenaCall& call, const Operation& op, std::uint32_t epoch) {
  const std::size_t element = op.element();
  const int me = call.rank();
  const auto payload = [&](int rank) -> const std::byte* { return call.arena.contribution(rank, epoch).payload; };
  switch (op.op) {
    case Op::all_reduce: return reduce_contributions(call, op, epoch, 0, op.count);
    case Op::reduce:
      if (me == op.root) reduce_contributions(call, op, epoch, 0, op.count);
      return;
    case Op::reduce_scatter:
      return reduce_contributions(call, op, epoch, op.parts.offset(me) * element, op.parts.count(me));
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
    default: return;  // barrier: the synchronisation was all
  }
}

// Ranks that called different things show each other where, and all throw the same list. Every rank sees all contributions, so
// every rank gets here; one more synchronisation carries the call sites. It has a short limit of its own: a rank that does not take
// part (it died, or it does not compare) leaves only its call without the place.
[[noreturn]] void throw_mismatch(ArenaCall& call, const Operation& op, std::uint32_t epoch) {
  Arena& arena = call.arena;
  std::vector<RankCall> calls;
  for (int r = 0; r < call.size(); ++r) {
    const auto& words = arena.contribution(r, epoch).words;
    const Signature theirs{words[0], words[1], words[2], words[3]};
    calls.push_back({.rank = arena.global_rank(r), .call = theirs.describe()});
  }
  const std::uint32_t second = arena.next_epoch();
  Contribution& mine = arena.contribution(call.rank(), second);
  std::string place;  // none: it is no call of the program
  if (*op.where.file_name() != '\0') place = fmt::format("{}:{}", op.where.file_name(), op.where.line());
  mine.mode = static_cast<std::uint32_t>(std::min(place.size(), Contribution::kPayload));
  std::memcpy(mine.payload, place.data(), mine.mode);
  arena.publish(second);

  OperationContext short_wait(std::chrono::milliseconds(500));
  for (int r = 0; r < call.size(); ++r) {
    try {
      if (r != call.rank()) arena.await(arena.contribution(r, second).stamp, second, r, short_wait);
      const Contribution& theirs = arena.contribution(r, second);
      calls[static_cast<std::size_t>(r)].place.assign(reinterpret_cast<const char*>(theirs.payload),
                                                      std::min<std::size_t>(theirs.mode, Contribution::kPayload));
    } catch (const Error&) {  // it stays without a place
    }
  }
  throw Mismatch(mismatch_of(std::move(calls)));
}

// Bytes that a rank contributes at most, the same number on all ranks (of an uneven all_to_all: not known to all).
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

void run_in_arena(ArenaCall& call, const Operation& op) {
  Arena& arena = call.arena;
  const std::uint32_t epoch = arena.next_epoch();
  arena.check_raised(epoch);
  Contribution& mine = arena.contribution(call.rank(), epoch);
  mine.words = {call.signature.seq, call.signature.what, call.signature.count, call.signature.detail};

  const bool uneven_all_to_all = op.op == Op::all_to_all && !(op.in_parts.equal() && op.out_parts.equal());
  const bool fits = !uneven_all_to_all && largest_input(op) <= inline_limit(call.size());
  Contribution::Refs refs{};
  if (!fits || worth_direct(op)) refs = references(call, op);
  const bool has_payload = fits && !(refs.in.segment != 0 && refs.out.segment != 0);
  mine.mode = has_payload ? kInline : kReferences;
  if (has_payload) {
    const auto bytes = input_of(op, call.rank());
    if (!bytes.empty()) std::memcpy(mine.payload, bytes.data(), bytes.size());
  } else {
    mine.refs() = refs;
  }
  arena.publish(epoch);
  call.context.contribution_published();
  arena.await_contributions(epoch, call.context);
  prefetch(arena.contribution(call.rank(), epoch + 1), has_payload ? largest_input(op) : 0);
  arena.check_raised(
      epoch);  // a rank that is late, after the others failed, finds their contributions, but they are gone

  if (call.compare) {
    std::uint64_t difference = 0;
    for (int r = 0; r < call.size(); ++r) {
      const Contribution& theirs = arena.contribution(r, epoch);
      difference |= (theirs.words[0] ^ call.signature.seq) | (theirs.words[1] ^ call.signature.what) |
                    (theirs.words[2] ^ call.signature.count) | (theirs.words[3] ^ call.signature.detail);
    }
    if (difference != 0) [[unlikely]]
      throw_mismatch(call, op, epoch);
  }
  int with_payload = fits ? call.size() : 0;  // ranks whose bytes are in their contributions
  if (fits && worth_direct(op)) {
    with_payload = 0;
    for (int r = 0; r < call.size(); ++r) with_payload += arena.contribution(r, epoch).mode == kInline ? 1 : 0;
  }
  if (with_payload == call.size()) {
    run_inline(call, op, epoch);
  } else if (with_payload != 0 || !arena_direct(call, op, epoch)) {
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
