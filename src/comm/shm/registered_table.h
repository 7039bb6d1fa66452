// The registered memory of this process, and the location of the peers' parts.
//
// An allocation is one segment: a page with a counter, then one part per local rank. A rank that drops its handle frees
// its pages at once. The mapping stays until all ranks have dropped their handles, because peers may still refer to it.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/base/fork_guard.h"
#include "comm/shm/arena.h"
#include "comm/shm/segment.h"
#include <maniple/comm/registered_memory.h>

namespace maniple {

class RegisteredTable : public std::enable_shared_from_this<RegisteredTable> {
 public:
  /// The segment size for parts of these sizes (one per local rank).
  static std::size_t segment_bytes(std::span<const std::size_t> sizes);

  /// Adds an allocation that all local ranks make together. Returns the handle of `local_rank`'s part.
  RegisteredMemory add(std::shared_ptr<Segment> segment, std::span<const std::size_t> sizes, int local_rank);

  /// The location of [data, data + bytes); segment 0 if the range is not entirely registered here.
  SharedRef find(const void* data, std::size_t bytes) const;
  /// The address of a peer's reference in this process. Throws ProtocolError if the reference is invalid.
  std::byte* resolve(const SharedRef& ref, std::size_t bytes) const;

  /// Every call reads this, so it does not take the lock: memory that is added or dropped concurrently does not belong
  /// to that call.
  bool empty() const noexcept { return empty_.load(std::memory_order_relaxed); }

 private:
  struct Entry {
    std::uint64_t id;
    std::shared_ptr<Segment> segment;
    std::size_t offset;  // start of this rank's part
    std::size_t bytes;
    std::uint32_t ranks;
  };
  void drop(std::uint64_t id);
  void sweep();  // removes allocations that all ranks have dropped

  ForkGuard guard_;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  std::atomic<bool> empty_{true};
  std::uint64_t next_id_ = 1;
};

}  // namespace maniple
