#include "comm/transport/sealed_channel.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "comm/base/check.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

// One system call moves several records.
constexpr std::size_t kRecordsAtOnce = 4;
constexpr std::size_t kPlainAtOnce = kRecordsAtOnce * kMaxRecordBytes;
constexpr std::size_t kSealedAtOnce = kRecordsAtOnce * (kMaxRecordBytes + kRecordOverhead);

/// A list of buffers, consumed from the front.
class Parts {
 public:
  explicit Parts(std::span<const iovec> parts) {
    MANIPLE_ASSERT(parts.size() <= rest_.size());
    for (const iovec& part : parts) {
      if (part.iov_len == 0) continue;
      rest_[count_++] = part;
      left_ += part.iov_len;
    }
  }
  std::size_t left() const noexcept { return left_; }
  std::span<const iovec> rest() const noexcept { return std::span(rest_).subspan(first_, count_ - first_); }
  void skip(std::size_t size) noexcept {
    left_ -= size;
    while (size > 0) {
      iovec& part = rest_[first_];
      const std::size_t step = std::min(size, part.iov_len);
      part = {static_cast<char*>(part.iov_base) + step, part.iov_len - step};
      size -= step;
      if (part.iov_len == 0) ++first_;
    }
  }
  void fill(const char* from, std::size_t size) noexcept {
    while (size > 0) {
      const iovec part = rest_[first_];
      const std::size_t step = std::min(size, part.iov_len);
      std::memcpy(part.iov_base, from, step);
      from += step;
      size -= step;
      skip(step);
    }
  }

 private:
  std::array<iovec, 4> rest_{};
  std::size_t first_ = 0;
  std::size_t count_ = 0;
  std::size_t left_ = 0;
};

class SealedSink final : public ByteSink {
 public:
  SealedSink(std::unique_ptr<ByteSink> sink, const ConnectionKeys& keys)
      : sink_(std::move(sink)), sealer_(keys.cipher, keys.send) {}

  std::size_t write_some(std::span<const iovec> offered) override {
    Parts parts(offered);
    std::size_t taken = 0;
    if (sent_ < end_) {
      if (!flush()) return 0;
      taken = 1;  // the last byte of the batch, now sent
      parts.skip(1);
    }
    while (parts.left() > 0) {
      const std::size_t size = seal(parts);
      if (!flush()) return taken + size - 1;
      taken += size;
    }
    return taken;
  }
  int fd() const noexcept override { return sink_->fd(); }
  bool authenticates() const noexcept override { return true; }

 private:
  std::size_t seal(Parts& parts) {
    const std::size_t batch = std::min(parts.left(), kPlainAtOnce);
    const std::size_t records = (batch + kMaxRecordBytes - 1) / kMaxRecordBytes;
    if (const std::size_t needed = batch + records * kRecordOverhead; needed > room_) {
      room_ = needed <= kSmall ? kSmall : kSealedAtOnce;
      batch_ = std::make_unique_for_overwrite<char[]>(room_);
    }
    sent_ = end_ = 0;
    for (std::size_t left = batch; left > 0;) {
      const std::size_t size = std::min(left, kMaxRecordBytes);
      sealer_.seal_record(parts.rest(), size, batch_.get() + end_);
      end_ += size + kRecordOverhead;
      parts.skip(size);
      left -= size;
    }
    return batch;
  }

  bool flush() {
    while (sent_ < end_) {
      const iovec part{batch_.get() + sent_, end_ - sent_};
      const std::size_t moved = sink_->write_some({&part, 1});
      if (moved == 0) return false;
      sent_ += moved;
    }
    return true;
  }

  static constexpr std::size_t kSmall = 4096;  // for pairs that exchange only small messages

  std::unique_ptr<ByteSink> sink_;
  RecordSealer sealer_;
  std::unique_ptr<char[]> batch_;  // records in transit: [sent, end)
  std::size_t room_ = 0;
  std::size_t sent_ = 0;
  std::size_t end_ = 0;
};

class SealedSource final : public ByteSource {
 public:
  SealedSource(std::unique_ptr<ByteSource> source, const ConnectionKeys& keys)
      : source_(std::move(source)), opener_(keys.cipher, keys.receive) {}

  std::size_t read_some(std::span<const iovec> room) override {
    Parts parts(room);
    const std::size_t asked = parts.left();
    for (;;) {
      while (parts.left() > 0 && (!plain_.empty() || open_next(parts))) {
        const std::size_t size = std::min(plain_.size(), parts.left());
        parts.fill(plain_.data(), size);
        plain_.remove_prefix(size);
      }
      if (parts.left() < asked || asked == 0) return asked - parts.left();
      if (!fetch()) return 0;
    }
  }
  int fd() const noexcept override { return source_->fd(); }
  bool holds_bytes() const noexcept override { return !plain_.empty() || end_ > begin_; }

 private:
  /// Decrypts the next record if it has arrived in full: directly into `parts` if they have room, otherwise in place.
  bool open_next(Parts& parts) {
    if (end_ - begin_ < kRecordHeaderBytes) return false;
    char* const record = bytes_.get() + begin_;
    const std::size_t size = opener_.size_of(record);
    if (end_ - begin_ < size + kRecordOverhead) return false;
    if (size <= parts.left()) {
      opener_.open_record(record, size, parts.rest());
      parts.skip(size);
    } else {
      plain_ = opener_.open_record(record, size);
    }
    begin_ += size + kRecordOverhead;
    return true;
  }

  bool fetch() {
    if (!bytes_) bytes_ = std::make_unique_for_overwrite<char[]>(kSealedAtOnce);
    if (begin_ > 0) {
      std::memmove(bytes_.get(), bytes_.get() + begin_, end_ - begin_);
      end_ -= begin_;
      begin_ = 0;
    }
    const iovec room{bytes_.get() + end_, kSealedAtOnce - end_};
    const std::size_t got = source_->read_some({&room, 1});
    end_ += got;
    return got > 0;
  }

  std::unique_ptr<ByteSource> source_;
  RecordOpener opener_;
  std::unique_ptr<char[]> bytes_;  // as received, not decrypted yet: [begin, end)
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::string_view plain_;  // rest of a decrypted record, in front of `begin`
};

}  // namespace

std::unique_ptr<ByteSink> make_sealed_sink(std::unique_ptr<ByteSink> sink, const ConnectionKeys& keys) {
  return std::make_unique<SealedSink>(std::move(sink), keys);
}

std::unique_ptr<ByteSource> make_sealed_source(std::unique_ptr<ByteSource> source, const ConnectionKeys& keys) {
  return std::make_unique<SealedSource>(std::move(source), keys);
}

std::unique_ptr<ByteSink> make_data_sink(SecureConnection connection, const TcpChannelOptions& options) {
  auto sink = make_tcp_sink(std::move(connection.fd), options);
  return connection.keys ? make_sealed_sink(std::move(sink), *connection.keys) : std::move(sink);
}

std::unique_ptr<ByteSource> make_data_source(SecureConnection connection, const TcpChannelOptions& options) {
  auto source = make_tcp_source(std::move(connection.fd), options);
  return connection.keys ? make_sealed_source(std::move(source), *connection.keys) : std::move(source);
}

}  // namespace maniple
