#include "comm/transport/frame_receiver.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "comm/base/crc32c.h"

namespace maniple {

FrameReceiver::FrameReceiver(Peer peer, Open open)
    : peer_(peer), kind_(FrameKind::collective), open_(std::move(open)), streams_(1) {}

FrameReceiver::FrameReceiver(Peer peer, std::unique_ptr<ByteSource> source)
    : peer_(peer), kind_(FrameKind::message), streams_(1) {
  set_source(streams_[0], std::move(source));
}

template <class Body>
auto FrameReceiver::with_peer_named(Body body) {
  try {
    return body();
  } catch (const SystemError& error) {
    throw peer_.lost(progress(), error, bytes());
  } catch (const ProtocolError& error) {
    const std::string so_far = progress();
    throw ProtocolError(fmt::format("invalid data from {}: {}{}{}{}", peer_.name(), error.what(),
                                    so_far.empty() ? "" : " (", so_far, so_far.empty() ? "" : ")"));
  }
}

bool FrameReceiver::advance(std::size_t most) {
  return with_peer_named([&] {
    bool moved = false;
    for (std::size_t index = 0; index < streams_.size(); ++index) moved |= advance(index, most);
    return moved;
  });
}

const FrameHeader* FrameReceiver::peek() {
  return with_peer_named([&]() -> const FrameHeader* {
    Stream& stream = streams_[0];
    skip_frames_without_piece(0);
    for (stream.dry = false; !offered_;) {
      const std::size_t more = missing(stream, true);
      if (more == 0) {
        offered_ = take_frame_header();
      } else if (!read_ahead(stream, more)) {
        return nullptr;
      }
    }
    return &*offered_;
  });
}

void FrameReceiver::accept(Transfer& transfer) {
  queue_.push_back(&transfer);
  with_peer_named([&] { begin(*offered_, transfer); });
  offered_.reset();
}

bool FrameReceiver::open(std::size_t index) {
  if (streams_[index].source) return true;
  auto source = open_(static_cast<int>(index));
  if (!source) return false;
  set_source(streams_[index], std::move(source));
  return true;
}

// The sender continues on the connection that this rank opened: see mesh.h.
void FrameReceiver::follow_notice() {
  Stream& stream = streams_[0];
  if (stream.begin != stream.end) throw ProtocolError("bytes behind the notice that frames continue elsewhere");
  auto source = moved_ ? nullptr : open_(kOwnConnection);
  if (!source) throw ProtocolError("frames are to continue on a connection that this rank has not opened");
  moved_ = true;
  stream.begin = stream.end = 0;
  stream.dry = false;
  set_source(stream, std::move(source));
}

void FrameReceiver::set_source(Stream& stream, std::unique_ptr<ByteSource> source) {
  stream.network = source->fd() >= 0;
  stream.ahead = std::make_unique_for_overwrite<std::byte[]>(kReadAheadBytes);
  stream.source = std::move(source);
}

bool FrameReceiver::advance(std::size_t index, std::size_t& budget) {
  skip_frames_without_piece(index);
  if (!wants_bytes(streams_[index]) || !open(index)) return false;
  streams_[index].dry = false;
  bool moved = false;
  while (budget > 0) {
    Stream& stream = streams_[index];
    if (stream.in_payload) {
      const std::size_t got = read_payload(stream);
      if (got == 0) return moved;
      budget -= std::min(budget, got);
      moved = true;
      continue;
    }
    skip_frames_without_piece(index);
    if (!wants_bytes(stream)) return moved;
    const bool frame = wants_frame_header(index);
    if (!frame && stream.begin == stream.end) {
      const std::size_t got = read_piece(stream);
      if (got == 0) return moved;
      budget -= std::min(budget, got);
    } else if (const std::size_t more = missing(stream, frame); more > 0) {
      if (!read_ahead(stream, more)) return moved;
    } else if (frame) {
      const FrameHeader header = take_frame_header();
      if (header.kind == FrameKind::notice) {
        follow_notice();
      } else {
        Transfer& transfer = at(stream.frame);
        check_call(header, transfer);
        begin(header, transfer);
      }
    } else {
      take_piece_header(stream);
    }
    moved = true;
  }
  return moved;
}

// Stream 0 carries a part of every frame. Other streams carry only frames with a piece for them, and read it only after
// stream 0 has taken the header.
void FrameReceiver::skip_frames_without_piece(std::size_t index) {
  Stream& stream = streams_[index];
  if (stream.in_payload) return;
  const auto start_at = [&](std::uint64_t frame) {
    stream.frame = frame;
    stream.piece = index;
  };
  if (stream.frame < first_) start_at(first_);
  for (; stream.frame < headers_seen_; start_at(stream.frame + 1)) {
    const Transfer& transfer = at(stream.frame);
    if (stream.piece < segment_count(transfer.size, transfer.pieced)) return;
  }
}

bool FrameReceiver::wants_bytes(const Stream& stream) const noexcept {
  if (stream.in_payload || stream.frame < headers_seen_) return true;
  return &stream == streams_.data() && stream.frame < first_ + queue_.size();
}

std::size_t FrameReceiver::read(Stream& stream, std::span<const iovec> parts) {
  if (stream.dry) return 0;
  const std::size_t got = stream.source->read_some(parts);
  std::size_t asked = 0;
  for (const iovec& part : parts) asked += part.iov_len;
  stream.dry = got < asked && stream.network;  // a ring may return less than requested and still hold more
  return got;
}

// Unread bytes of the next header. The first part of a frame header determines its length.
std::size_t FrameReceiver::missing(const Stream& stream, bool frame) const noexcept {
  const std::size_t have = stream.end - stream.begin;
  std::size_t size = kPieceHeaderBytes;
  if (frame) {
    size = have < kFrameHeaderBytes ? header_bytes(kind_) : header_bytes(stream.ahead.get() + stream.begin);
  }
  return size - std::min(size, have);
}

bool FrameReceiver::read_ahead(Stream& stream, std::size_t missing) {
  if (stream.begin > 0) {
    std::memmove(stream.ahead.get(), stream.ahead.get() + stream.begin, stream.end - stream.begin);
    stream.end -= stream.begin;
    stream.begin = 0;
  }
  const iovec part{stream.ahead.get() + stream.end, stream.network ? kReadAheadBytes - stream.end : missing};
  const std::size_t got = read(stream, {&part, 1});
  stream.end += got;
  return got > 0;
}

// Reads a piece header and the piece into place with one call: the next piece is known in advance.
std::size_t FrameReceiver::read_piece(Stream& stream) {
  const Transfer& transfer = at(stream.frame);
  const std::size_t offset = stream.piece * kPieceBytes;
  const std::size_t size = std::min(kPieceBytes, transfer.size - offset);
  std::byte* const rest = stream.ahead.get() + kPieceHeaderBytes;
  const iovec parts[3] = {{stream.ahead.get(), kPieceHeaderBytes},
                          {transfer.to + offset, size},
                          {rest, kReadAheadBytes - kPieceHeaderBytes}};
  const std::size_t got = read(stream, std::span(parts).first(stream.network ? 3 : 2));
  stream.begin = 0;
  stream.end = std::min(got, kPieceHeaderBytes);
  if (got < kPieceHeaderBytes) return got;
  take_piece_header(stream);
  const std::size_t of_payload = std::min(got - kPieceHeaderBytes, size);
  stream.end += got - kPieceHeaderBytes - of_payload;
  if (of_payload > 0) took_payload(stream, of_payload);
  return got;
}

std::size_t FrameReceiver::read_payload(Stream& stream) {
  if (const std::size_t ready = std::min(stream.left, stream.end - stream.begin); ready > 0) {
    std::memcpy(stream.to, stream.ahead.get() + stream.begin, ready);
    stream.begin += ready;
    took_payload(stream, ready);
    return ready;
  }
  const iovec parts[2] = {{stream.to, stream.left}, {stream.ahead.get(), kReadAheadBytes}};
  const std::size_t got = read(stream, std::span(parts).first(stream.network ? 2 : 1));
  if (got == 0) return 0;
  const std::size_t of_payload = std::min(got, stream.left);
  stream.begin = 0;
  stream.end = got - of_payload;
  took_payload(stream, of_payload);
  return got;
}

void FrameReceiver::took_payload(Stream& stream, std::size_t size) {
  Transfer& transfer = at(stream.frame);
  if (transfer.checked) stream.check = crc32c(stream.check, stream.to, size);
  stream.to += size;
  stream.left -= size;
  transfer.moved += size;
  if (stream.left == 0) finish_segment(stream);
}

FrameHeader FrameReceiver::take_frame_header() {
  Stream& stream = streams_[0];
  const FrameHeader header = decode_frame_header(stream.ahead.get() + stream.begin);
  stream.begin += header_bytes(header.kind);
  const bool notice = header.kind == FrameKind::notice && kind_ == FrameKind::collective;
  if (header.kind != kind_ && !notice) {
    throw ProtocolError(kind_ == FrameKind::message ? "a collective on a connection for messages"
                                                    : "a message on a connection for collectives");
  }
  if (header.number != static_cast<std::uint32_t>(stream.frame)) {
    throw ProtocolError(
        fmt::format("frame {} where {} was expected", header.number, static_cast<std::uint32_t>(stream.frame)));
  }
  return header;
}

void FrameReceiver::check_call(const FrameHeader& header, const Transfer& transfer) const {
  const bool same_call = header.signature == *transfer.signature;
  if (same_call && header.length == transfer.size) [[likely]]
    return;
  ErrorInfo info;
  info.reason =
      same_call ? fmt::format("{} sent {} bytes where this rank expects {}, in {}; the counts of the ranks disagree",
                              peer_.name(), header.length, transfer.size, transfer.signature->describe())
                : fmt::format("{} called {}, this rank called {}; all ranks must make the same calls in the same order",
                              peer_.name(), header.signature.describe(), transfer.signature->describe());
  // The Exchange adds this rank's own call.
  info.calls = {{.rank = peer_.global_rank, .call = header.signature.describe()}};
  throw Mismatch(std::move(info));
}

void FrameReceiver::begin(const FrameHeader& header, Transfer& transfer) {
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
      added.frame = first_;
      added.piece = index;
    }
  } else {
    start_payload(streams_[0], 0, transfer.size, header.check);
  }
}

void FrameReceiver::take_piece_header(Stream& stream) {
  const PieceHeader header = decode_piece_header(
      std::span<const std::byte, kPieceHeaderBytes>(stream.ahead.get() + stream.begin, kPieceHeaderBytes));
  stream.begin += kPieceHeaderBytes;
  if (header.number != static_cast<std::uint32_t>(stream.frame) || header.index != stream.piece) {
    throw ProtocolError(fmt::format("piece {} of frame {} where piece {} of frame {} was expected", header.index,
                                    header.number, stream.piece, static_cast<std::uint32_t>(stream.frame)));
  }
  const std::size_t offset = stream.piece * kPieceBytes;
  start_payload(stream, offset, std::min(kPieceBytes, at(stream.frame).size - offset), header.check);
}

void FrameReceiver::start_payload(Stream& stream, std::size_t offset, std::size_t size, std::uint32_t expected_check) {
  stream.in_payload = true;
  stream.to = at(stream.frame).to + offset;
  stream.left = size;
  stream.check = 0;
  stream.expected_check = expected_check;
  if (size == 0) finish_segment(stream);
}

void FrameReceiver::finish_segment(Stream& stream) {
  Transfer& transfer = at(stream.frame);
  if (transfer.checked && stream.check != stream.expected_check) {
    throw ProtocolError(fmt::format(
        "corrupt payload in {}: CRC-32C {:08x}, computed {:08x}; check the memory and network of both hosts",
        transfer.describe(), stream.expected_check, stream.check));
  }
  stream.in_payload = false;
  stream.piece += transfer.streams;
  transfer.done = --transfer.segments_left == 0;
  for (; !queue_.empty() && queue_.front()->done; ++first_) queue_.pop_front();
}

bool FrameReceiver::awaits_connection() const noexcept {
  return std::any_of(streams_.begin(), streams_.end(),
                     [this](const Stream& stream) { return !stream.source && wants_bytes(stream); });
}

bool FrameReceiver::has_read_ahead() const noexcept {
  return std::any_of(streams_.begin(), streams_.end(), [](const Stream& stream) {
    return stream.begin < stream.end || (stream.source && stream.source->holds_bytes());
  });
}

void FrameReceiver::add_descriptors(std::vector<pollfd>& descriptors) const {
  for (const Stream& stream : streams_) {
    if (stream.source && wants_bytes(stream)) descriptors.push_back({stream.source->fd(), POLLIN, 0});
  }
}

std::string FrameReceiver::progress() const {
  if (queue_.empty()) return {};
  const TransferProgress now = bytes();
  return fmt::format("{} received{}", bytes_of(now.moved, now.expected), streams_[0].source ? "" : ", not connected");
}

}  // namespace maniple
