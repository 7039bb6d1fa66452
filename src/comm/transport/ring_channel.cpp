#include "comm/transport/ring_channel.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "comm/base/check.h"
#include "comm/shm/arena_layout.h"

namespace maniple {
namespace {

constexpr std::size_t kLine = 64;

// Positions only grow; an index into the ring is the position modulo the capacity. Each position has its own cache
// line. The writer loads the reader's position only when the ring seems full, so a small message transfers one line of
// the head, which also holds both flags.
struct RingHead {
  alignas(kLine) std::atomic<std::uint64_t> written;
  std::atomic<std::uint32_t> writer_gone;
  std::atomic<std::uint32_t> reader_gone;
  alignas(kLine) std::atomic<std::uint64_t> read;
};
static_assert(sizeof(RingHead) == ArenaLayout::kRingHeadBytes);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

class Ring {
 public:
  explicit Ring(std::span<std::byte> memory)
      : head_(reinterpret_cast<RingHead*>(memory.data())),
        data_(memory.data() + sizeof(RingHead)),
        capacity_(memory.size() - sizeof(RingHead)) {
    MANIPLE_REQUIRE(memory.size() > sizeof(RingHead) && std::has_single_bit(capacity_),
                    "a ring in {} bytes of memory; give it ring_bytes(capacity)", memory.size());
    MANIPLE_REQUIRE(reinterpret_cast<std::uintptr_t>(memory.data()) % kLine == 0, "a ring that is not on a cache line");
  }

  RingHead& head() const noexcept { return *head_; }
  std::size_t capacity() const noexcept { return capacity_; }
  /// Bytes moved before the other side is notified, so that both sides copy at the same time.
  std::size_t stride() const noexcept { return std::max<std::size_t>(capacity_ / 4, 1); }
  /// Prefetches the bytes at a position while the caller reads other lines.
  void prefetch(std::uint64_t position) const noexcept { __builtin_prefetch(data_ + (position & (capacity_ - 1))); }

  void put(std::uint64_t position, const std::byte* from, std::size_t size) const noexcept {
    const std::size_t at = position & (capacity_ - 1);
    const std::size_t first = std::min(size, capacity_ - at);
    std::memcpy(data_ + at, from, first);
    if (size > first) std::memcpy(data_, from + first, size - first);
  }
  void get(std::uint64_t position, std::byte* to, std::size_t size) const noexcept {
    const std::size_t at = position & (capacity_ - 1);
    const std::size_t first = std::min(size, capacity_ - at);
    std::memcpy(to, data_ + at, first);
    if (size > first) std::memcpy(to + first, data_, size - first);
  }

  /// Bytes in the ring, according to the two positions.
  std::size_t filled(std::uint64_t written, std::uint64_t read) const {
    const std::uint64_t size = written - read;
    if (size > capacity_) throw ProtocolError("the positions of a shared ring contradict each other");
    return size;
  }

 private:
  RingHead* head_;
  std::byte* data_;
  std::size_t capacity_;
};

class RingSink final : public ByteSink {
 public:
  RingSink(std::span<std::byte> memory, NotifyPeer notify_peer)
      : ring_(memory),
        notify_peer_(std::move(notify_peer)),
        written_(ring_.head().written.load(std::memory_order_relaxed)),
        read_(ring_.head().read.load(std::memory_order_acquire)) {}
  ~RingSink() override {
    ring_.head().writer_gone.store(1, std::memory_order_release);
    if (notify_peer_) notify_peer_();
  }

  std::size_t write_some(std::span<const iovec> parts) override {
    if (ring_.head().reader_gone.load(std::memory_order_acquire) != 0) throw_left("ring closed by the peer", EPIPE);
    std::size_t offered = 0;
    for (const iovec& part : parts) offered += part.iov_len;
    std::size_t free = ring_.capacity() - ring_.filled(written_, read_);
    if (free < std::min(offered, ring_.stride())) {
      read_ = ring_.head().read.load(std::memory_order_acquire);
      free = ring_.capacity() - ring_.filled(written_, read_);
    }
    free = std::min(free, ring_.stride());
    const std::uint64_t before = written_;
    std::uint64_t shown = written_;
    for (const iovec& part : parts) {
      const auto* from = static_cast<const std::byte*>(part.iov_base);
      for (std::size_t left = std::min(free, part.iov_len); left > 0;) {
        const std::size_t size = std::min<std::size_t>(left, kShown - (written_ - shown));
        ring_.put(written_, from, size);
        written_ += size;
        from += size;
        left -= size;
        free -= size;
        if (written_ - shown == kShown) shown = show();
      }
    }
    if (written_ != shown) show();
    return written_ - before;
  }
  int fd() const noexcept override { return -1; }
  std::size_t capacity() const noexcept override { return ring_.capacity(); }
  std::size_t room() override {
    if (ring_.head().reader_gone.load(std::memory_order_relaxed) != 0) return 0;
    std::size_t free = ring_.capacity() - ring_.filled(written_, read_);
    if (free < ring_.stride()) {
      read_ = ring_.head().read.load(std::memory_order_acquire);
      free = ring_.capacity() - ring_.filled(written_, read_);
    }
    return std::min(free, ring_.stride());
  }

 private:
  // Bytes after which the written position is published, so that the reader starts while the rest is copied.
  static constexpr std::size_t kShown = 16 * 1024;

  std::uint64_t show() {
    ring_.head().written.store(written_, std::memory_order_release);
    if (notify_peer_) notify_peer_();
    return written_;
  }

  Ring ring_;
  NotifyPeer notify_peer_;
  std::uint64_t written_;
  std::uint64_t read_;  // the reader's position when last loaded
};

class RingSource final : public ByteSource {
 public:
  RingSource(std::span<std::byte> memory, NotifyPeer notify_peer)
      : ring_(memory), notify_peer_(std::move(notify_peer)), read_(ring_.head().read.load(std::memory_order_relaxed)) {}
  ~RingSource() override {
    ring_.head().reader_gone.store(1, std::memory_order_release);
    if (notify_peer_) notify_peer_();
  }

  std::size_t read_some(std::span<const iovec> parts) override {
    ring_.prefetch(read_);
    // Read the flag first: all bytes written before it was set are then visible below.
    const bool writer_gone = ring_.head().writer_gone.load(std::memory_order_acquire) != 0;
    std::size_t filled = ring_.filled(ring_.head().written.load(std::memory_order_acquire), read_);
    if (filled == 0) {
      if (writer_gone) throw_left("ring closed by the peer", ECONNRESET);
      return 0;
    }
    const bool half_full = filled >= ring_.capacity() / 2;
    filled = std::min(filled, ring_.stride());
    const std::uint64_t before = read_;
    for (const iovec& part : parts) {
      const std::size_t size = std::min(filled, part.iov_len);
      if (size > 0) ring_.get(read_, static_cast<std::byte*>(part.iov_base), size);
      read_ += size;
      filled -= size;
    }
    ring_.head().read.store(read_, std::memory_order_release);
    // A waiting writer has found the ring full, so it is notified if the ring may have been full. Neither side waits
    // for its stores to become visible, so the ring may look emptier than it was; therefore each quarter read is
    // notified, too.
    const bool quarter_read = before / ring_.stride() != read_ / ring_.stride();
    if ((half_full || quarter_read) && notify_peer_) notify_peer_();
    return read_ - before;
  }
  int fd() const noexcept override { return -1; }
  std::size_t ready() override {
    return std::min(ring_.filled(ring_.head().written.load(std::memory_order_acquire), read_), ring_.stride());
  }

 private:
  Ring ring_;
  NotifyPeer notify_peer_;
  std::uint64_t read_;
};

}  // namespace

std::size_t ring_bytes(std::size_t capacity) {
  MANIPLE_REQUIRE(std::has_single_bit(capacity), "a ring of {} bytes; the capacity must be a power of two", capacity);
  return sizeof(RingHead) + capacity;
}

std::unique_ptr<ByteSink> make_ring_sink(std::span<std::byte> memory, NotifyPeer notify_peer) {
  return std::make_unique<RingSink>(memory, std::move(notify_peer));
}

std::unique_ptr<ByteSource> make_ring_source(std::span<std::byte> memory, NotifyPeer notify_peer) {
  return std::make_unique<RingSource>(memory, std::move(notify_peer));
}

}  // namespace maniple
