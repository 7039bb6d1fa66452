// A channel over a byte ring in shared memory: one writer and one reader, in any two processes or threads.
//
// Zeroed memory is an empty ring, so a fresh memfd needs no set-up and either side may be first. The capacity follows
// from the memory's size, never from its contents, and positions that the other side wrote are checked before use: a
// faulty peer causes a ProtocolError, not an access outside the ring.
//
// Each side sees when the other closes: reading an empty ring whose writer has gone, and writing to a ring whose reader
// has gone, throw SystemError. The memory must outlive both ends; `notify_peer` may own it.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include "comm/transport/byte_channel.h"

namespace maniple {

/// Size of the memory for a ring that holds `capacity` bytes (a power of two). Align the memory to a cache line.
std::size_t ring_bytes(std::size_t capacity);

/// Wakes the other side if it sleeps. Called after a write, after a read from a ring that may have been full, and when
/// an end is destroyed. May be empty.
using NotifyPeer = std::function<void()>;

std::unique_ptr<ByteSink> make_ring_sink(std::span<std::byte> memory, NotifyPeer notify_peer = {});
std::unique_ptr<ByteSource> make_ring_source(std::span<std::byte> memory, NotifyPeer notify_peer = {});

}  // namespace maniple
