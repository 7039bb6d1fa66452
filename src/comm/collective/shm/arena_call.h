// Collectives between ranks that share memory. `run_in_arena` runs any operation by one of three algorithms:
//
//   inline   small buffers: every rank publishes its bytes with the call and reads what it needs from the others. One
//            synchronisation; in rooted operations ranks that only send do not wait. (run.cpp)
//   direct   registered memory: ranks work on each other's buffers in place. Two synchronisations, no copies. Also
//            ordinary memory in operations that only move bytes, read from its process where that is faster.
//            (direct.cpp)
//   staged   other ordinary memory: bytes pass through slots in cache-sized pieces, in a pipeline. (staged_*.cpp)
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>

#include "comm/base/copy.h"
#include "comm/call/operation.h"
#include "comm/call/signature.h"
#include "comm/collective/reduce/reduce.h"
#include "comm/shm/arena.h"
#include "comm/shm/registered_table.h"

namespace maniple {

/// One value per rank, without an allocation for groups of up to 32 ranks.
template <class T>
class RankList {
 public:
  explicit RankList(int size) : size_(size) {
    if (size_ > kFew) many_ = std::make_unique<T[]>(size_);
  }
  T& operator[](int rank) noexcept { return data()[rank]; }
  std::span<T> span() noexcept { return {data(), size_}; }

 private:
  static constexpr std::size_t kFew = 32;
  T* data() noexcept { return many_ ? many_.get() : few_.data(); }
  std::size_t size_;
  std::array<T, kFew> few_;
  std::unique_ptr<T[]> many_;
};

struct ArenaCall {
  Arena& arena;
  const RegisteredTable& registered;
  OperationContext& context;
  Signature signature;  ///< the signature that ranks compare; this call may be one stage of it
  bool compare = true;  ///< whether ranks compare their calls
  /// "staged": use no buffer in place; "direct": use every possible one in place; else automatic
  std::string_view forced = {};

  int rank() const noexcept { return arena.rank(); }
  int size() const noexcept { return arena.size(); }
};

void run_in_arena(ArenaCall& call, const Operation& operation);

/// The same for a group of one rank.
void run_alone(const Operation& operation);

/// Whether the contributions have room for the counts of an uneven all_to_all, one per rank.
inline bool arena_holds_counts(const Arena& arena) noexcept {
  return arena.size() * sizeof(std::uint64_t) <= arena.payload_bytes();
}

/// For all_to_all: throws a Mismatch if the element count that rank `from` sends differs from the one this rank
/// expects.
void check_arena_count(const Arena& arena, int from, std::size_t sent, std::size_t expected);

/// Copies to an operation's result, past the caches if the result exceeds them.
class ResultCopy {
 public:
  ResultCopy() noexcept = default;  ///< for a result that fits into the caches
  /// `bytes`: size of the whole result on each of `ranks` ranks.
  ResultCopy(std::size_t bytes, int ranks) noexcept
      : large_(exceeds_caches(bytes, ranks)), very_large_(exceeds_caches(bytes / 4, ranks)) {}
  bool is_very_large() const noexcept { return very_large_; }
  void operator()(void* to, const void* from, std::size_t bytes) const noexcept {
    if (large_) return copy_past_caches(to, from, bytes);
    if (bytes != 0) std::memcpy(to, from, bytes);
  }

 private:
  bool large_ = false, very_large_ = false;
};

/// For operations that only move bytes.
inline ResultCopy result_copy_of(const Operation& op, int ranks) noexcept {
  const std::size_t element = op.element();
  switch (op.op) {
    case Op::broadcast: return {op.bytes() / 2, ranks};  // all read the same
    case Op::gather: return {op.parts.total() * element, 1};
    case Op::all_gather: return {op.parts.total() * element, ranks};
    case Op::all_to_all: return {op.out_parts.total() * element, ranks};
    case Op::scatter: return {op.parts.largest() * element, ranks};
    default: return {};
  }
}

// ---- The algorithms, after the contributions have been exchanged ----------------------------------------------------

/// The rank that chooses between reading ordinary memory from its process and the staged algorithm. It must be a
/// receiver: a rank that only sends through the stage cannot measure how long the operation takes.
inline int arena_chooser(const Operation& op) noexcept {
  if (op.op == Op::gather) return op.root;
  return (op.op == Op::broadcast || op.op == Op::scatter) && op.root == 0 ? 1 : 0;
}
/// Whether both are possible for this operation.
bool arena_has_choice(ArenaCall& call, const Operation& operation, std::uint32_t epoch);

/// Returns false if the memory involved cannot be used in place.
bool arena_direct(ArenaCall& call, const Operation& operation, std::uint32_t epoch);
void arena_staged_reduce(ArenaCall& call, const Operation& operation);                     ///< all_reduce, reduce
void arena_staged_move(ArenaCall& call, const Operation& operation, std::uint32_t epoch);  ///< all other operations

}  // namespace maniple
