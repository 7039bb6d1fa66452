#include "comm/transport/frame_sender.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/base/crc32c.h"

namespace maniple {
namespace {
// If a message is too long to be read together with its header, the header is sent ahead (the checksum is in the piece
// header). The receiver then wakes up and finds its receive while the checksum is computed and the payload copied.
constexpr std::size_t kEarlyHeaderBytes = kReadAheadBytes - kFrameHeaderBytes;
}  // namespace

FrameSender::FrameSender(Peer peer, int streams, Open open)
    : peer_(peer),
      kind_(FrameKind::collective),
      most_streams_(std::clamp(streams, 1, kMaxStreams)),
      open_(std::move(open)) {}

FrameSender::FrameSender(Peer peer, std::unique_ptr<ByteSink> sink)
    : peer_(peer), kind_(FrameKind::message), most_streams_(1) {
  add_stream(std::move(sink));
}

void FrameSender::open_next(Deadline deadline) { add_stream(open_(static_cast<int>(streams_.size()), deadline)); }

void FrameSender::add_stream(std::unique_ptr<ByteSink> sink) {
  network_ = sink->fd() >= 0;
  authenticates_ = sink->authenticates();
  checks_ = network_ && !authenticates_ && sink->wants_checksums();
  Stream& stream = streams_.emplace_back();
  stream.sink = std::move(sink);
  stream.piece = streams_.size() - 1;
}

void FrameSender::post(Transfer& transfer, Deadline deadline) {
  if (streams_.empty()) open_next(deadline);
  transfer.checked = checks_;
  transfer.pieced = network_ && transfer.size > (kind_ == FrameKind::message ? kEarlyHeaderBytes : kPieceBytes);
  transfer.streams = static_cast<std::uint8_t>(network_ ? most_streams_ : 1);
  transfer.segments_left = segment_count(transfer.size, transfer.pieced);
  while (streams_.size() < std::min<std::uint64_t>(transfer.segments_left, transfer.streams)) open_next(deadline);
  queue_.push_back(&transfer);
}

void FrameSender::move_to(std::unique_ptr<ByteSink> sink) {
  Stream& stream = streams_[0];
  FrameHeader notice;
  notice.kind = FrameKind::notice;
  notice.number = static_cast<std::uint32_t>(first_);
  encode(notice, stream.headers.data());
  stream.headers_size = header_bytes(FrameKind::notice);
  stream.headers_done = 0;
  next_sink_ = std::move(sink);
  moved_ = true;
}

bool FrameSender::send_notice() {
  Stream& stream = streams_[0];
  const iovec part{stream.headers.data() + stream.headers_done, stream.headers_size - stream.headers_done};
  stream.headers_done += write(stream, {&part, 1});
  if (stream.headers_done < stream.headers_size) return false;
  stream.sink = std::move(next_sink_);
  return true;
}

bool FrameSender::advance(std::size_t most) {
  bool moved = false;
  for (std::size_t index = 0; index < streams_.size(); ++index) moved |= advance(index, most);
  return moved;
}

bool FrameSender::advance(std::size_t index, std::size_t& budget) {
  Stream& stream = streams_[index];
  bool moved = false;
  while (budget > 0) {
    if (!stream.loaded) {
      if (index == 0 && next_sink_ && !send_notice()) return moved;
      if (!find_segment(index)) return moved;
      load_segment(index);
    }
    const std::size_t headers_left = stream.headers_size - stream.headers_done;
    const iovec parts[2] = {{stream.headers.data() + stream.headers_done, headers_left},
                            {const_cast<std::byte*>(stream.payload), stream.payload_left}};  // a sink only reads it
    const std::size_t skip = headers_left == 0 ? 1 : 0;
    const std::size_t take = stream.payload_left == 0 ? 1 : 2;
    const std::size_t written = write(stream, std::span(parts).subspan(skip, take - skip));
    if (written == 0) return moved;
    moved = true;
    budget -= std::min(budget, written);
    const bool all = written == headers_left + stream.payload_left;
    const std::size_t of_headers = std::min(written, headers_left);
    stream.headers_done += of_headers;
    stream.payload += written - of_headers;
    stream.payload_left -= written - of_headers;
    at(stream.frame).moved += written - of_headers;
    if (all) {
      finish_segment(index);
      if (queue_.empty()) return true;
    } else if (network_) {
      return true;  // a socket that took less than offered is full: another call would fail
    }
  }
  return moved;
}

std::size_t FrameSender::write(Stream& stream, std::span<const iovec> parts) const {
  try {
    return stream.sink->write_some(parts);
  } catch (const SystemError& error) {
    throw peer_.lost(progress(), error, bytes());
  }
}

bool FrameSender::find_segment(std::size_t index) {
  Stream& stream = streams_[index];
  const auto start_at = [&](std::uint64_t frame) {
    stream.frame = frame;
    stream.piece = index;
  };
  if (stream.frame < first_) start_at(first_);
  for (; stream.frame < first_ + queue_.size(); start_at(stream.frame + 1)) {
    const Transfer& transfer = at(stream.frame);
    if (stream.piece < segment_count(transfer.size, transfer.pieced)) return true;
  }
  return false;
}

void FrameSender::load_segment(std::size_t index) {
  Stream& stream = streams_[index];
  const Transfer& transfer = at(stream.frame);
  const std::size_t offset = stream.piece * kPieceBytes;
  stream.payload = transfer.from + offset;
  stream.payload_left = transfer.pieced ? std::min(kPieceBytes, transfer.size - offset) : transfer.size;
  stream.headers_size = 0;
  stream.headers_done = 0;
  stream.loaded = true;

  const auto number = static_cast<std::uint32_t>(stream.frame);
  const auto checksum = [&] { return transfer.checked ? crc32c(0, stream.payload, stream.payload_left) : 0; };
  if (stream.piece == 0) {
    const FrameHeader header{.kind = kind_,
                             .signature = transfer.signature != nullptr ? *transfer.signature : Signature{},
                             .dtype = transfer.dtype,
                             .tag = transfer.tag,
                             .length = transfer.size,
                             .number = number,
                             .check = transfer.pieced ? 0 : checksum(),
                             .streams = transfer.streams,
                             .checked = transfer.checked,
                             .pieced = transfer.pieced};
    encode(header, stream.headers.data());
    stream.headers_size = header_bytes(kind_);
    if (kind_ == FrameKind::message && transfer.size > kEarlyHeaderBytes && !authenticates_) {
      const iovec part{stream.headers.data(), stream.headers_size};
      stream.headers_done = write(stream, {&part, 1});
    }
  }
  if (transfer.pieced) {
    const PieceHeader header{.number = number, .index = static_cast<std::uint32_t>(stream.piece), .check = checksum()};
    encode(header,
           std::span<std::byte, kPieceHeaderBytes>(stream.headers.data() + stream.headers_size, kPieceHeaderBytes));
    stream.headers_size += kPieceHeaderBytes;
  }
}

void FrameSender::finish_segment(std::size_t index) {
  Stream& stream = streams_[index];
  Transfer& transfer = at(stream.frame);
  stream.loaded = false;
  stream.piece += transfer.streams;
  transfer.done = --transfer.segments_left == 0;
  for (; !queue_.empty() && queue_.front()->done; ++first_) queue_.pop_front();
}

void FrameSender::add_descriptors(std::vector<pollfd>& descriptors) const {
  for (std::size_t index = 0; index < streams_.size(); ++index) {
    // A stream without a loaded segment has sent its share of all pending frames.
    const Stream& stream = streams_[index];
    if (stream.loaded || (index == 0 && next_sink_)) descriptors.push_back({stream.sink->fd(), POLLOUT, 0});
  }
}

std::string FrameSender::progress() const {
  const TransferProgress now = bytes();
  return fmt::format("{} sent", bytes_of(now.moved, now.expected));
}

}  // namespace maniple
