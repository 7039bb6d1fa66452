// Collectives of ranks that share memory. `run_in_arena` does any operation; the files arena_*.cpp hold the algorithms:
//
//   inline   small: every rank posts its bytes with the call and takes what it needs from the others' posts. One meeting.
//   direct   registered memory: ranks work on each other's buffers where they lie. Two meetings, no copies.
//   staged   ordinary memory: bytes pass through slots in cache-sized pieces, in a pipeline.
#pragma once

#include <string_view>

#include "call/operation.h"
#include "collective/reduce/reduce.h"
#include "call/signature.h"
#include "shm/arena.h"
#include "shm/registered_table.h"

namespace maniple {

struct ArenaCall {
  Arena& arena;
  const RegisteredTable& registered;
  OperationContext& context;
  Signature signature;           ///< of the call that ranks compare (this may be one stage of it)
  bool compare = true;           ///< compare what ranks call
  std::string_view forced = {};  ///< "staged" keeps to it where it applies ("" : by size and memory)

  int rank() const noexcept { return arena.rank(); }
  int size() const noexcept { return arena.size(); }
};

void run_in_arena(ArenaCall& call, const Operation& operation);

/// The same for a group of one.
void run_alone(const Operation& operation);

/// Bytes that a rank contributes at most, the same number on all ranks (0 for uneven all_to_all: not known to all).
std::size_t largest_contribution(const Operation& operation) noexcept;

// ---- The algorithms, after the posts have been exchanged --------------------------------------------------------------

void arena_inline(ArenaCall& call, const Operation& operation, std::uint32_t epoch);
/// False if the memory that matters is not registered.
bool arena_direct(ArenaCall& call, const Operation& operation, std::uint32_t epoch);
void arena_staged_reduce(ArenaCall& call, const Operation& operation);  ///< all_reduce, reduce
void arena_staged_move(ArenaCall& call, const Operation& operation, std::uint32_t epoch);  ///< the others

/// Throws Mismatch, after telling each other where the calls were made.
[[noreturn]] void arena_mismatch(ArenaCall& call, const Operation& operation, std::uint32_t epoch);

}  // namespace maniple
