// Reads what gzip wrote, from memory, in whatever portions are asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace maniple {

/// By content: the two bytes that gzip begins with.
bool is_gzip(std::string_view bytes) noexcept;

/// Deflate makes at best 1032 bytes of one; what claims to hold more lies.
inline constexpr std::size_t kGzipBestRatio = 1032;

class GzipReader {
 public:
  /// The bytes must outlive the reader. `name` is for errors.
  GzipReader(std::string_view bytes, std::string name);
  ~GzipReader();
  GzipReader(const GzipReader&) = delete;
  GzipReader& operator=(const GzipReader&) = delete;

  /// Fills `size` bytes, or fewer when the end is reached. Throws InvalidArgument naming file and offset when the data is
  /// truncated, damaged (its CRC-32 is compared) or followed by something else. Several members in a row are one file.
  std::size_t read(std::uint8_t* to, std::size_t size);

 private:
  struct Stream;
  std::unique_ptr<Stream> stream_;
  std::string name_;
};

}  // namespace maniple
