// Sequential reading of a file, decompressing gzip, or of a text in memory. Without LibTorch.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace maniple {

class ReadableBytes {
 public:
  explicit ReadableBytes(std::string name) : name_(std::move(name)) {}
  virtual ~ReadableBytes() = default;
  ReadableBytes(const ReadableBytes&) = delete;
  ReadableBytes& operator=(const ReadableBytes&) = delete;

  /// Used in errors. For gzip, the name states that offsets count uncompressed bytes.
  const std::string& name() const noexcept { return name_; }
  std::size_t offset() const noexcept { return offset_; }  ///< of the next byte

  /// Returns fewer than `size` bytes only at the end.
  std::size_t read(void* to, std::size_t size) {
    const std::size_t got = read_some(static_cast<char*>(to), size);
    offset_ += got;
    return got;
  }
  /// Skips `size` bytes; fewer only at the end.
  std::size_t skip(std::size_t size) {
    const std::size_t passed = skip_some(size);
    offset_ += passed;
    return passed;
  }
  /// Remaining bytes, if known.
  virtual std::optional<std::size_t> left() const { return std::nullopt; }

 protected:
  virtual std::size_t read_some(char* to, std::size_t size) = 0;
  virtual std::size_t skip_some(std::size_t size) = 0;

 private:
  std::string name_;
  std::size_t offset_ = 0;
};

std::unique_ptr<ReadableBytes> open_bytes(const std::string& path);
/// The bytes must outlive the reader. They may be gzip data, too.
std::unique_ptr<ReadableBytes> bytes_in_memory(std::string_view bytes, const std::string& name);

}  // namespace maniple
