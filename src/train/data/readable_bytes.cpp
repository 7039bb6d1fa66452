#include "train/data/readable_bytes.h"

#define ZLIB_CONST  // next_in of the stream points to const
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "comm/base/check.h"
#include "comm/base/system_error.h"
#include "train/disk_file.h"

namespace maniple {
namespace {

constexpr std::size_t kFirstPortion = std::size_t{4} << 10, kPortion = std::size_t{256} << 10;

class FileBytes final : public ReadableBytes {
 public:
  explicit FileBytes(const std::string& path) : ReadableBytes(path), file_(path) {}
  std::optional<std::size_t> left() const override { return file_.size() - at_; }

 private:
  std::size_t read_some(char* to, std::size_t size) override {
    size = std::min(size, file_.size() - at_);
    std::size_t done = 0;
    while (done < size) {
      if (at_ >= portion_at_ && at_ < portion_at_ + portion_.size()) {
        const std::size_t inside = at_ - portion_at_;
        const std::size_t count = std::min(size - done, portion_.size() - inside);
        std::memcpy(to + done, portion_.data() + inside, count);
        done += count;
        at_ += count;
      } else if (size - done >= kPortion) {  // reads directly into the destination
        file_.read(at_, to + done, size - done);
        at_ += size - done;
        done = size;
      } else {
        portion_.resize(std::min(portion_size_, file_.size() - at_));
        portion_at_ = at_;
        portion_size_ = std::min(2 * portion_size_, kPortion);
        file_.read(at_, portion_.data(), portion_.size());
      }
    }
    return done;
  }
  std::size_t skip_some(std::size_t size) override {
    size = std::min(size, file_.size() - at_);
    at_ += size;
    if (at_ > portion_at_ + portion_.size())
      portion_size_ = kFirstPortion;  // probably a header, followed by the next skip
    return size;
  }

  RegularFile file_;
  std::size_t at_ = 0;
  std::size_t portion_at_ = 0;
  std::size_t portion_size_ = kFirstPortion;  ///< of the next read; grows during sequential reading
  std::vector<char> portion_ = {};
};

class MemoryBytes final : public ReadableBytes {
 public:
  MemoryBytes(std::string_view bytes, const std::string& name) : ReadableBytes(name), bytes_(bytes) {}
  std::optional<std::size_t> left() const override { return bytes_.size(); }

 private:
  std::size_t read_some(char* to, std::size_t size) override {
    size = std::min(size, bytes_.size());
    std::copy_n(bytes_.data(), size, to);
    bytes_.remove_prefix(size);
    return size;
  }
  std::size_t skip_some(std::size_t size) override {
    size = std::min(size, bytes_.size());
    bytes_.remove_prefix(size);
    return size;
  }

  std::string_view bytes_;
};

/// Decompresses gzip data. Several consecutive members are one file; the CRC-32 of each is verified.
class UnzippedBytes final : public ReadableBytes {
 public:
  explicit UnzippedBytes(std::unique_ptr<ReadableBytes> zipped)
      : ReadableBytes(zipped->name() + " (uncompressed)"), zipped_(std::move(zipped)), input_(std::size_t{64} << 10) {
    constexpr int kGzipOnly = 16 + MAX_WBITS;
    if (::inflateInit2(&z_, kGzipOnly) != Z_OK)
      throw_system_error("zlib cannot start reading " + zipped_->name(), ENOMEM);
  }
  ~UnzippedBytes() override { ::inflateEnd(&z_); }

 private:
  std::size_t read_some(char* to, std::size_t size) override {
    std::size_t done = 0;
    while (done < size && !ended_) {
      feed();
      const auto portion = static_cast<uInt>(std::min(size - done, std::size_t{1} << 30));
      z_.next_out = reinterpret_cast<Bytef*>(to + done);
      z_.avail_out = portion;
      const int result = ::inflate(&z_, Z_NO_FLUSH);
      done += portion - z_.avail_out;
      const std::size_t place = zipped_->offset() - z_.avail_in;
      if (result == Z_STREAM_END) {
        feed();
        if (z_.avail_in == 0) {
          ended_ = true;
        } else {
          MANIPLE_REQUIRE(z_.next_in[0] == 0x1f, "{}: offset {}: something that is not gzip follows its end",
                          zipped_->name(), place);
          ::inflateReset(&z_);
        }
        continue;
      }
      MANIPLE_REQUIRE(result != Z_BUF_ERROR || z_.avail_in != 0 || zipped_->left().value_or(1) != 0,
                      "{}: ends at offset {}, in the middle of its gzip data: the file is truncated", zipped_->name(),
                      place);
      if (result == Z_MEM_ERROR) throw_system_error("zlib cannot read " + zipped_->name(), ENOMEM);
      MANIPLE_REQUIRE(result == Z_OK || result == Z_BUF_ERROR, "{}: offset {}: damaged gzip data: {}", zipped_->name(),
                      place, z_.msg != nullptr ? z_.msg : "zlib gives no reason");
    }
    return done;
  }
  std::size_t skip_some(std::size_t size) override {
    std::vector<char> passed(std::min(size, kPortion));
    std::size_t done = 0;
    while (done < size) {
      const std::size_t got = read_some(passed.data(), std::min(passed.size(), size - done));
      if (got == 0) break;
      done += got;
    }
    return done;
  }
  void feed() {
    if (z_.avail_in != 0) return;
    z_.next_in = reinterpret_cast<const Bytef*>(input_.data());
    z_.avail_in = static_cast<uInt>(zipped_->read(input_.data(), input_.size()));
  }

  std::unique_ptr<ReadableBytes> zipped_;
  std::vector<char> input_;
  z_stream z_ = {};
  bool ended_ = false;
};

template <class Open>
std::unique_ptr<ReadableBytes> by_content(Open open) {
  char start[2] = {};
  if (open()->read(start, 2) == 2 && std::string_view(start, 2) == "\x1f\x8b")
    return std::make_unique<UnzippedBytes>(open());
  return open();
}

}  // namespace

std::unique_ptr<ReadableBytes> open_bytes(const std::string& path) {
  return by_content([&] { return std::make_unique<FileBytes>(path); });
}

std::unique_ptr<ReadableBytes> bytes_in_memory(std::string_view bytes, const std::string& name) {
  return by_content([&] { return std::make_unique<MemoryBytes>(bytes, name); });
}

}  // namespace maniple
