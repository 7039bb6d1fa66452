#include "transport/recv_lane.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"

namespace maniple {
namespace {
constexpr std::size_t kAheadBytes = 4096;
}

RecvLane::RecvLane(Peer peer, Open open) : peer_(peer), open_(std::move(open)) { streams_.resize(1); }

bool RecvLane::advance() {
  try {
    bool moved = false;
    for (std::size_t index = 0; index < streams_.size(); ++index) moved |= advance(index);
    return moved;
  } catch (const SystemError& error) {
    throw peer_.lost(progress(), error.what());
  } catch (const ProtocolError& error) {
    throw ProtocolError(fmt::format("{} sent what Maniple would not: {} ({})", peer_.name(), error.what(), progress()));
  }
}

bool RecvLane::advance(std::size_t index) {
  skip_messages_without_piece(index);
  if (!wants_bytes(streams_[index])) return false;
  if (!streams_[index].source) {
    auto source = open_(static_cast<int>(index));
    if (!source) return false;
    streams_[index].source = std::move(source);
    streams_[index].ahead = std::make_unique_for_overwrite<std::byte[]>(kAheadBytes);
  }
  streams_[index].dry = false;
  bool moved = false;
  for (;;) {
    Stream& stream = streams_[index];
    if (stream.in_payload) {
      if (!read_payload(stream)) return moved;
      moved = true;
      continue;
    }
    skip_messages_without_piece(index);
    if (!wants_bytes(stream)) return moved;
    const bool frame = wants_frame_header(index);
    if (stream.end - stream.begin < (frame ? kFrameHeaderBytes : kPieceHeaderBytes)) {
      if (!read_ahead(stream)) return moved;
    } else if (frame) {
      take_frame_header();
    } else {
      take_piece_header(stream);
    }
    moved = true;
  }
}

// Stream 0 meets every message; the others meet only those that have a piece for them, and only after stream 0 has seen
// the header.
void RecvLane::skip_messages_without_piece(std::size_t index) {
  Stream& stream = streams_[index];
  if (stream.in_payload) return;
  const auto start_at = [&](std::uint64_t message) {
    stream.message = message;
    stream.piece = index;
  };
  if (stream.message < first_) start_at(first_);
  for (; stream.message < headers_seen_; start_at(stream.message + 1)) {
    const Transfer& transfer = at(stream.message);
    if (stream.piece < segment_count(transfer.size, transfer.pieced)) return;
  }
}

bool RecvLane::wants_bytes(const Stream& stream) const noexcept {
  if (stream.in_payload || stream.message < headers_seen_) return true;
  return &stream == streams_.data() && stream.message < first_ + queue_.size();
}

std::size_t RecvLane::read(Stream& stream, std::span<const iovec> parts) {
  if (stream.dry) return 0;
  const std::size_t got = stream.source->read_some(parts);
  std::size_t asked = 0;
  for (const iovec& part : parts) asked += part.iov_len;
  stream.dry = got < asked && stream.source->fd() >= 0;  // rings give less than asked for although there is more
  return got;
}

bool RecvLane::read_ahead(Stream& stream) {
  if (stream.begin > 0) {
    std::memmove(stream.ahead.get(), stream.ahead.get() + stream.begin, stream.end - stream.begin);
    stream.end -= stream.begin;
    stream.begin = 0;
  }
  const iovec part{stream.ahead.get() + stream.end, kAheadBytes - stream.end};
  const std::size_t got = read(stream, {&part, 1});
  stream.end += got;
  return got > 0;
}

bool RecvLane::read_payload(Stream& stream) {
  if (const std::size_t ready = std::min(stream.left, stream.end - stream.begin); ready > 0) {
    std::memcpy(stream.to, stream.ahead.get() + stream.begin, ready);
    stream.begin += ready;
    took_payload(stream, ready);
    return true;
  }
  const iovec parts[2] = {{stream.to, stream.left}, {stream.ahead.get(), kAheadBytes}};
  const std::size_t got = read(stream, parts);
  if (got == 0) return false;
  const std::size_t of_payload = std::min(got, stream.left);
  stream.begin = 0;
  stream.end = got - of_payload;
  took_payload(stream, of_payload);
  return true;
}

void RecvLane::took_payload(Stream& stream, std::size_t size) {
  Transfer& transfer = at(stream.message);
  if (transfer.checked) stream.check = crc32c(stream.check, stream.to, size);
  stream.to += size;
  stream.left -= size;
  transfer.moved += size;
  if (stream.left == 0) finish_segment(stream);
}

void RecvLane::take_frame_header() {
  Stream& stream = streams_[0];
  const FrameHeader header = decode_frame_header(
      std::span<const std::byte, kFrameHeaderBytes>(stream.ahead.get() + stream.begin, kFrameHeaderBytes));
  stream.begin += kFrameHeaderBytes;
  Transfer& transfer = at(stream.message);
  if (header.signature != *transfer.signature) {
    throw Mismatch(
        fmt::format("{} called {}, this rank called {}; all ranks must make the same calls in the same order",
                    peer_.name(), header.signature.describe(), transfer.signature->describe()));
  }
  if (header.number != static_cast<std::uint32_t>(stream.message)) {
    throw ProtocolError(
        fmt::format("message {} where {} was due", header.number, static_cast<std::uint32_t>(stream.message)));
  }
  if (header.length != transfer.size) {
    throw Mismatch(fmt::format("{} sent {} bytes where this rank expects {}, in {}; the counts of the ranks disagree",
                               peer_.name(), header.length, transfer.size, transfer.signature->describe()));
  }
  transfer.pieced = header.pieced;
  transfer.checked = header.checked;
  transfer.streams = header.streams;
  transfer.segments_left = segment_count(header.length, header.pieced);
  ++headers_seen_;
  if (header.pieced) {
    const auto needed = std::min<std::uint64_t>(transfer.segments_left, transfer.streams);
    while (streams_.size() < needed) {
      const std::size_t index = streams_.size();
      Stream& added = streams_.emplace_back();
      added.message = first_;
      added.piece = index;
    }
  } else {
    start_payload(stream, 0, transfer.size, header.check);
  }
}

void RecvLane::take_piece_header(Stream& stream) {
  const PieceHeader header = decode_piece_header(
      std::span<const std::byte, kPieceHeaderBytes>(stream.ahead.get() + stream.begin, kPieceHeaderBytes));
  stream.begin += kPieceHeaderBytes;
  if (header.number != static_cast<std::uint32_t>(stream.message) || header.index != stream.piece) {
    throw ProtocolError(fmt::format("piece {} of message {} where piece {} of message {} was due", header.index,
                                    header.number, stream.piece, static_cast<std::uint32_t>(stream.message)));
  }
  const std::size_t offset = stream.piece * kPieceBytes;
  start_payload(stream, offset, std::min(kPieceBytes, at(stream.message).size - offset), header.check);
}

void RecvLane::start_payload(Stream& stream, std::size_t offset, std::size_t size, std::uint32_t expected_check) {
  stream.in_payload = true;
  stream.to = at(stream.message).to + offset;
  stream.left = size;
  stream.check = 0;
  stream.expected_check = expected_check;
  if (size == 0) finish_segment(stream);
}

void RecvLane::finish_segment(Stream& stream) {
  Transfer& transfer = at(stream.message);
  if (transfer.checked && stream.check != stream.expected_check) {
    throw ProtocolError(fmt::format(
        "corrupt payload in {}: CRC-32C {:08x}, computed {:08x}; look at the memory and network of both hosts",
        transfer.signature->describe(), stream.expected_check, stream.check));
  }
  stream.in_payload = false;
  stream.piece += transfer.streams;
  transfer.done = --transfer.segments_left == 0;
  for (; !queue_.empty() && queue_.front()->done; ++first_) queue_.pop_front();
}

bool RecvLane::awaits_connection() const noexcept {
  return std::any_of(streams_.begin(), streams_.end(),
                     [this](const Stream& stream) { return !stream.source && wants_bytes(stream); });
}

bool RecvLane::has_read_ahead() const noexcept {
  return std::any_of(streams_.begin(), streams_.end(), [](const Stream& stream) {
    return stream.begin < stream.end || (stream.source && stream.source->holds_bytes());
  });
}

void RecvLane::add_descriptors(std::vector<pollfd>& descriptors) const {
  for (const Stream& stream : streams_) {
    if (stream.source && wants_bytes(stream)) descriptors.push_back({stream.source->fd(), POLLIN, 0});
  }
}

std::string RecvLane::progress() const {
  std::size_t moved = 0;
  std::size_t size = 0;
  for (const Transfer* transfer : queue_) {
    moved += transfer->moved;
    size += transfer->size;
  }
  return fmt::format("{} received{}", bytes_of(moved, size), streams_[0].source ? "" : ", not connected");
}

}  // namespace maniple
