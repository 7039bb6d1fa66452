#include "comm/shm/registered_table.h"

#include <fcntl.h>

#include <atomic>

#include <fmt/format.h>

#include "comm/base/check.h"

namespace maniple {
namespace {

constexpr std::size_t kTablePage = 4096;

std::size_t part_bytes(std::size_t bytes) { return (bytes + kTablePage - 1) / kTablePage * kTablePage; }

std::atomic<std::uint32_t>& dropped(Segment& segment) {
  return *reinterpret_cast<std::atomic<std::uint32_t>*>(segment.data());
}

}  // namespace

std::size_t RegisteredTable::segment_bytes(std::span<const std::size_t> sizes) {
  std::size_t total = kTablePage;
  for (const std::size_t size : sizes) total += part_bytes(size);
  return total;
}

RegisteredMemory RegisteredTable::add(std::shared_ptr<Segment> segment, std::span<const std::size_t> sizes,
                                      int local_rank) {
  if (segment->size() != segment_bytes(sizes)) {
    throw ProtocolError(
        fmt::format("registered memory of {} bytes expected, got {}", segment_bytes(sizes), segment->size()));
  }
  std::size_t offset = kTablePage;
  for (int r = 0; r < local_rank; ++r) offset += part_bytes(sizes[r]);
  const std::size_t bytes = sizes[local_rank];
  segment->populate(offset, part_bytes(bytes));
  segment->share_with_children();
  std::byte* data = segment->data() + offset;
  std::uint64_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    sweep();
    id = next_id_++;
    entries_.push_back({id, segment, offset, bytes, static_cast<std::uint32_t>(sizes.size())});
    empty_.store(false, std::memory_order_relaxed);
  }
  auto self = shared_from_this();
  std::shared_ptr<void> owner(data, [self, segment, id](void*) { self->drop(id); });
  return {data, bytes, std::move(owner)};
}

void RegisteredTable::drop(std::uint64_t id) {
  if (!guard_.owned()) return;  // a child of fork() only drops its copy of the handle
  const std::lock_guard lock(mutex_);
  for (const Entry& entry : entries_) {
    if (entry.id != id) continue;
    ::fallocate(entry.segment->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(entry.offset),
                static_cast<off_t>(part_bytes(entry.bytes)));
    dropped(*entry.segment).fetch_add(1, std::memory_order_acq_rel);
  }
  sweep();
}

void RegisteredTable::sweep() {
  std::erase_if(entries_, [](const Entry& entry) {
    return dropped(*entry.segment).load(std::memory_order_acquire) >= entry.ranks;
  });
  empty_.store(entries_.empty(), std::memory_order_relaxed);
}

SharedRef RegisteredTable::find(const void* data, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto* first = static_cast<const std::byte*>(data);
  for (const Entry& entry : entries_) {
    const std::byte* base = entry.segment->data() + entry.offset;
    if (first >= base && first + bytes <= base + entry.bytes) {
      return {entry.id, static_cast<std::uint64_t>(first - entry.segment->data())};
    }
  }
  return {};
}

std::byte* RegisteredTable::resolve(const SharedRef& ref, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  for (const Entry& entry : entries_) {
    if (entry.id == ref.segment && ref.offset <= entry.segment->size() && bytes <= entry.segment->size() - ref.offset) {
      return entry.segment->data() + ref.offset;
    }
  }
  throw ProtocolError(
      fmt::format("a peer named registered memory {} at {} that this rank does not have", ref.segment, ref.offset));
}

}  // namespace maniple
