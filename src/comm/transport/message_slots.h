// Small messages from one rank to another of the same host: each in a slot, beside the ring that carries the others.
//
// The receiver looks at the slot itself, so a message of up to 48 bytes costs the transfer of one cache line from core
// to core. Which came first, the message in the slot or the next frame in the ring, is known as a slot says how many
// frames were sent before it; and as it is written before any later frame, whoever sees that frame sees the slot.
//
// One writer, one reader. Memory that is all zero has no messages. What the other side wrote is checked before use.
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
    std::span<const std::byte> bytes;  ///< in the slot, until `pop`
  };

  /// The slots are as large as the memory allows, a multiple of a cache line.
  MessageSlots(std::span<std::byte> memory, NotifyPeer notify_peer)
      : memory_(memory.data()),
        slot_bytes_(memory.size() < kLine ? 0 : (memory.size() - kLine) / kCount / kLine * kLine),
        notify_peer_(std::move(notify_peer)) {
    MANIPLE_REQUIRE(slot_bytes_ >= kLine && reinterpret_cast<std::uintptr_t>(memory_) % kLine == 0,
                    "{} slots for messages in {} bytes of memory; each takes a cache line", kCount, memory.size());
    count_ = taken_ = taken().load(std::memory_order_acquire);
  }

  /// The writer: false when it is too large for a slot, or all are taken. `frames`: sent before.
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

  /// The reader: whether the next message, after `frames` frames, is in a slot.
  bool ready(std::uint32_t frames) const noexcept {
    const Slot& slot = at(count_);
    return slot.stamp.load(std::memory_order_acquire) == count_ + 1 && slot.frames == frames;
  }
  /// That message.
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

  // What the message is; its bytes follow.
  struct Slot {
    std::atomic<std::uint32_t> stamp;  // how many messages there were with this one
    std::uint32_t frames;
    std::int32_t tag;
    std::uint8_t dtype;
    std::uint16_t size;
  };
  static_assert(sizeof(Slot) == 16 && std::atomic<std::uint32_t>::is_always_lock_free);

  // How many the reader has taken; the writer looks when the slots seem full.
  std::atomic<std::uint32_t>& taken() const noexcept { return *reinterpret_cast<std::atomic<std::uint32_t>*>(memory_); }
  Slot& at(std::uint32_t count) const noexcept {
    return *reinterpret_cast<Slot*>(memory_ + kLine + count % kCount * slot_bytes_);
  }

  static std::byte* payload(Slot& slot) noexcept { return reinterpret_cast<std::byte*>(&slot + 1); }

  std::byte* memory_;
  std::size_t slot_bytes_;
  NotifyPeer notify_peer_;
  std::uint32_t count_ = 0;  // messages written, or read
  std::uint32_t taken_ = 0;  // the writer's knowledge of what was read
};

}  // namespace maniple
