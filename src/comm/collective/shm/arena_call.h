// Collectives of ranks that share memory. `run_in_arena` runs any operation, by one of three algorithms:
//
//   inline   small: every rank publishes its bytes with the call and takes what it needs from the others'. One
//            synchronisation; in rooted operations those that only send do not wait. (run.cpp)
//   direct   registered memory: ranks work on each other's buffers where they lie. Two synchronisations, no copies.
//            Also ordinary memory of operations that only move bytes, read out of its process where that is faster.
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

/// One value for each rank, without an allocation for groups of usual size.
template <class T>
class RankList {
 public:
  explicit RankList(int size) : size_(static_cast<std::size_t>(size)) {
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
  Signature signature;           ///< of the call that ranks compare (this may be one stage of it)
  bool compare = true;           ///< compare what ranks call
  std::string_view forced = {};  ///< "staged": no buffer is used where it lies; "direct": each that can be. Else chosen

  int rank() const noexcept { return arena.rank(); }
  int size() const noexcept { return arena.size(); }
};

void run_in_arena(ArenaCall& call, const Operation& operation);

/// The same for a group of one.
void run_alone(const Operation& operation);

/// Whether the counts of an uneven all_to_all are in the contributions: one for each rank.
inline bool arena_holds_counts(const Arena& arena) noexcept {
  return static_cast<std::size_t>(arena.size()) * sizeof(std::uint64_t) <= arena.payload_bytes();
}

/// Of all_to_all: throws a Mismatch if this rank expects another number of elements from a rank than that sends.
void check_arena_count(const Arena& arena, int from, std::size_t sent, std::size_t expected);

/// Copies to the result of an operation.
class ResultCopy {
 public:
  ResultCopy() noexcept = default;  ///< that is in the caches
  /// `bytes`: of the whole result, on each of so many ranks.
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

/// Of operations that only move bytes.
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

/// The rank that chooses between reading ordinary memory out of its process and the stage: one that receives, because
/// one that only sends into the stage does not see how long it takes.
inline int arena_chooser(const Operation& op) noexcept {
  if (op.op == Op::gather) return op.root;
  return (op.op == Op::broadcast || op.op == Op::scatter) && op.root == 0 ? 1 : 0;
}
/// Whether there is a choice.
bool arena_has_choice(ArenaCall& call, const Operation& operation, std::uint32_t epoch);

/// False if the memory that matters cannot be used where it lies.
bool arena_direct(ArenaCall& call, const Operation& operation, std::uint32_t epoch);
void arena_staged_reduce(ArenaCall& call, const Operation& operation);                     ///< all_reduce, reduce
void arena_staged_move(ArenaCall& call, const Operation& operation, std::uint32_t epoch);  ///< the others

}  // namespace maniple
