// Small messages between two ranks of one host: each takes a slot, alongside the ring for all other messages.
//
// The receiver polls the slot itself, so a message of up to 48 bytes costs the transfer of one cache line from core to
// core. Each slot records how many frames were sent before it, which orders its message and the next frame in the ring.
// A slot is written before any later frame, so a reader that sees the frame also sees the slot.
//
// One writer, one reader. Zeroed memory holds no messages. Values written by the other side are checked before use.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

#include "comm/base/check.h"
#include "comm/transport/ring_channel.h"
#include <maniple/comm/types.h>

namespace maniple {

class MessageSlots {
 public:
  struct Small {
    std::int32_t tag;
    DType dtype;
    std::span<const std::byte> bytes;  ///< points into the slot; valid until `pop`
  };

  /// Divides the memory into slots of equal size, each a multiple of a cache line.
  MessageSlots(std::span<std::byte> memory, NotifyPeer notify_peer)
      : memory_(memory.data()),
        slot_bytes_(memory.size() < kLine ? 0 : (memory.size() - kLine) / kCount / kLine * kLine),
        notify_peer_(std::move(notify_peer)) {
    MANIPLE_REQUIRE(slot_bytes_ >= kLine && reinterpret_cast<std::uintptr_t>(memory_) % kLine == 0,
                    "{} slots for messages in {} bytes of memory; each takes a cache line", kCount, memory.size());
    count_ = taken_ = taken().load(std::memory_order_acquire);
  }

  /// Writer: returns false if the message exceeds a slot or all slots are taken. `frames`: number of frames sent
  /// before.
  bool put(std::int32_t tag, DType dtype, const std::byte* data, std::size_t size, std::uint32_t frames) {
    if (size > slot_bytes_ - sizeof(Slot)) return false;
    if (count_ - taken_ >= kCount) {
      taken_ = taken().load(std::memory_order_acquire);
      if (count_ - taken_ > kCount) throw ProtocolError("the counts of shared slots contradict each other");
      if (count_ - taken_ == kCount) return false;
    }
    Slot& slot = at(count_);
    slot.frames = frames;
    slot.tag = tag;
    slot.dtype = static_cast<std::uint8_t>(dtype);
    slot.size = static_cast<std::uint16_t>(size);
    if (size > 0) std::memcpy(payload(slot), data, size);
    slot.stamp.store(++count_, std::memory_order_release);
    if (notify_peer_) notify_peer_();
    return true;
  }

  /// Reader: whether the next message, after `frames` frames, is in a slot.
  bool ready(std::uint32_t frames) const noexcept {
    const Slot& slot = at(count_);
    return slot.stamp.load(std::memory_order_acquire) == count_ + 1 && slot.frames == frames;
  }
  /// Returns that message.
  Small next() const {
    Slot& slot = at(count_);
    const std::uint8_t dtype = slot.dtype;
    const std::uint16_t size = slot.size;
    if (dtype >= kDTypeCount || size > slot_bytes_ - sizeof(Slot))
      throw ProtocolError("a slot for messages holds none");
    return {slot.tag, static_cast<DType>(dtype), {payload(slot), size}};
  }
  void pop() noexcept { taken().store(++count_, std::memory_order_release); }

 private:
  static constexpr std::size_t kLine = 64;
  static constexpr std::uint32_t kCount = 8;

  // The message's header; its bytes follow.
  struct Slot {
    std::atomic<std::uint32_t> stamp;  // number of messages written, this one included
    std::uint32_t frames;
    std::int32_t tag;
    std::uint8_t dtype;
    std::uint16_t size;
  };
  static_assert(sizeof(Slot) == 16 && std::atomic<std::uint32_t>::is_always_lock_free);

  // Number of messages the reader has taken. The writer loads it only when the slots seem full.
  std::atomic<std::uint32_t>& taken() const noexcept { return *reinterpret_cast<std::atomic<std::uint32_t>*>(memory_); }
  Slot& at(std::uint32_t count) const noexcept {
    return *reinterpret_cast<Slot*>(memory_ + kLine + count % kCount * slot_bytes_);
  }

  static std::byte* payload(Slot& slot) noexcept { return reinterpret_cast<std::byte*>(&slot + 1); }

  std::byte* memory_;
  std::size_t slot_bytes_;
  NotifyPeer notify_peer_;
  std::uint32_t count_ = 0;  // messages written, or read
  std::uint32_t taken_ = 0;  // the writer's last copy of taken()
};

}  // namespace maniple
