// Which addresses of this process lie in registered memory, and where the peers' parts are.
//
// An allocation is one segment: a page with a counter, then one part per local rank. A rank that drops its handle gives
// its pages back at once; the mapping itself stays until all ranks have dropped theirs, because peers may still name
// it.
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
  /// `segment_bytes` for parts of these sizes (one for each local rank).
  static std::size_t segment_bytes(std::span<const std::size_t> sizes);

  /// Adds an allocation that all local ranks make together. `local_rank`'s part becomes the handle.
  RegisteredMemory add(std::shared_ptr<Segment> segment, std::span<const std::size_t> sizes, int local_rank);

  /// Where [data, data + bytes) lies; segment 0 if it is not (wholly) registered here.
  SharedRef find(const void* data, std::size_t bytes) const;
  /// The address of a peer's reference in this process. Throws ProtocolError when there is no such memory.
  std::byte* resolve(const SharedRef& ref, std::size_t bytes) const;

  /// Read by every call, so without the lock: memory that is added or dropped meanwhile is not that call's.
  bool empty() const noexcept { return empty_.load(std::memory_order_relaxed); }

 private:
  struct Entry {
    std::uint64_t id;
    std::shared_ptr<Segment> segment;
    std::size_t offset;  // of this rank's part
    std::size_t bytes;
    std::uint32_t ranks;
  };
  void drop(std::uint64_t id);
  void sweep();  // forgets what all ranks have dropped

  ForkGuard guard_;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  std::atomic<bool> empty_{true};
  std::uint64_t next_id_ = 1;
};

}  // namespace maniple
