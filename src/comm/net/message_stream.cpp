#include "comm/net/message_stream.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/write_all.h"

namespace maniple {
namespace {

constexpr std::size_t kKeptBatchBytes = 4096;  // memory kept for the next batch

}  // namespace

std::optional<WireMessage> MessageReader::next(std::string_view& bytes) {
  if (!in_body_) {
    const std::size_t step = std::min(format_.header_bytes - taken_, bytes.size());
    std::copy_n(bytes.begin(), step, incoming_.begin() + static_cast<std::ptrdiff_t>(taken_));
    bytes.remove_prefix(step);
    taken_ += step;
    if (taken_ < format_.header_bytes) return std::nullopt;
    message_.header = incoming_;
    message_.body.clear();
    const MessageFormat::Length length = format_.length(header());
    if (length.bytes > length.limit) {
      throw ProtocolError(
          fmt::format("a message of {} bytes where at most {} are allowed", length.bytes, length.limit));
    }
    missing_ = length.bytes;
    taken_ = 0;
    in_body_ = true;
  }
  const std::size_t step = std::min<std::uint64_t>(missing_, bytes.size());
  message_.body.append(bytes.substr(0, step));
  bytes.remove_prefix(step);
  missing_ -= step;
  if (missing_ != 0) return std::nullopt;
  in_body_ = false;
  return WireMessage{message_.header, std::exchange(message_.body, {})};
}

MessageStream::MessageStream(SecureConnection connection, const MessageFormat& format, std::size_t records_at_once)
    : fd_(std::move(connection.fd)),
      opener_(connection.keys.value().cipher, connection.keys->receive),
      reader_(format),
      sealer_(connection.keys->cipher, connection.keys->send),
      records_at_once_(records_at_once) {
  MANIPLE_ASSERT(format.header_bytes <= kMaxMessageHeader);
}

void MessageStream::close() {
  fd_.reset();
  pieces_.clear();
  queued_bytes_ = 0;
  batch_.clear();
  sent_ = 0;
}

MessageStream::Received MessageStream::receive(std::span<char> room) {
  for (;;) {
    const ssize_t got = ::recv(fd_.get(), room.data(), room.size(), MSG_DONTWAIT);
    if (got > 0) {
      received_ = room.first(got);
      return {.state = Received::State::bytes, .bytes = received_.size()};
    }
    if (got == 0) return {.state = Received::State::end};
    if (errno == EAGAIN) return {.state = Received::State::nothing};
    if (errno != EINTR) return {.state = Received::State::broken, .error = errno};
  }
}

std::optional<WireMessage> MessageStream::next() {
  for (;;) {
    if (auto message = reader_.next(plain_)) return message;
    const auto opened = opener_.next(received_);
    if (!opened) return std::nullopt;
    plain_ = *opened;
    heard_ = Clock::now();
  }
}

std::string_view MessageStream::end_text() const noexcept {
  return reader_.in_message() ? "closed in the middle of a message" : "closed";
}

void MessageStream::queue(std::shared_ptr<const std::string> bytes) {
  const std::string_view view = *bytes;
  append({std::move(bytes), view});
}

void MessageStream::append(Piece piece) {
  if (piece.bytes.empty()) return;
  queued_bytes_ += piece.bytes.size();
  pieces_.push_back(std::move(piece));
}

int MessageStream::flush() {
  while (fill()) {
    sent_ += send_all(fd_.get(), std::string_view(batch_).substr(sent_), MSG_DONTWAIT);
    if (sent_ < batch_.size()) return errno == EAGAIN ? 0 : errno;
  }
  return 0;
}

// Seals the next bytes once the batch has been sent. Late sealing bounds the encrypted copies of large shared bodies to
// one batch per connection.
bool MessageStream::fill() {
  if (sent_ < batch_.size()) return true;
  sent_ = 0;
  batch_.clear();
  if (batch_.capacity() > kKeptBatchBytes && pieces_.empty()) batch_ = {};
  for (std::size_t i = 0; i < records_at_once_ && !pieces_.empty(); ++i) fill_record();
  return !batch_.empty();
}

void MessageStream::fill_record() {
  constexpr std::size_t kMaxParts = 16;
  iovec parts[kMaxParts];
  std::size_t count = 0;
  std::size_t size = 0;
  for (auto piece = pieces_.begin(); piece != pieces_.end() && count < kMaxParts; ++piece, ++count) {
    // iovec lacks const; sealing does not write.
    parts[count] = {const_cast<char*>(piece->bytes.data()), piece->bytes.size()};
    size += piece->bytes.size();
  }
  size = std::min(size, kMaxRecordBytes);
  const std::size_t at = batch_.size();
  batch_.resize(at + size + kRecordOverhead);
  sealer_.seal_record(std::span(parts, count), size, batch_.data() + at);
  consume(size);
}

void MessageStream::consume(std::size_t count) {
  queued_bytes_ -= count;
  while (count > 0) {
    std::string_view& front = pieces_.front().bytes;
    const std::size_t step = std::min(count, front.size());
    front.remove_prefix(step);
    count -= step;
    if (front.empty()) pieces_.pop_front();
  }
}

}  // namespace maniple
