// A ring of bytes in shared memory as a channel: one writer, one reader, in any two processes or threads.
//
// Memory that is all zero is an empty ring, so a fresh memfd needs no set-up and either side may be first. The
// capacity is taken from the size of the memory, never from its contents, and positions that the other side wrote are
// checked before use: a faulty peer causes a ProtocolError, not an access outside the ring.
//
// The end of one side is visible to the other: reading an emptied ring whose writer has gone, and writing to one whose
// reader has gone, throw SystemError. The memory must outlive both ends; `notify_peer` may own it.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include "comm/transport/byte_channel.h"

namespace maniple {

/// Bytes of memory for a ring that holds `capacity` bytes (a power of two). Place it on a cache line.
std::size_t ring_bytes(std::size_t capacity);

/// Called after bytes were written, after bytes were read from a ring that may have been full, and when the end goes:
/// wakes the other side if it sleeps. May be empty.
using NotifyPeer = std::function<void()>;

std::unique_ptr<ByteSink> make_ring_sink(std::span<std::byte> memory, NotifyPeer notify_peer = {});
std::unique_ptr<ByteSource> make_ring_source(std::span<std::byte> memory, NotifyPeer notify_peer = {});

}  // namespace maniple
