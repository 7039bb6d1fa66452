// A file whose bytes are on the disk, and hashed, when finish() returns.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/unique_fd.h"
#include "train/data/regular_file.h"

namespace maniple {

struct FileDigest {
  std::uint64_t bytes = 0;
  std::string sha256;  ///< 64 hexadecimal digits
  friend bool operator==(const FileDigest&, const FileDigest&) = default;
};

/// Creates the file; it must not exist. Every failure throws SystemError naming the path: a full disk, say.
class DurableFile {
 public:
  explicit DurableFile(std::string path);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  FileDigest finish();  ///< writes out, fsyncs, closes

 private:
  struct Hash;
  std::string path_;
  UniqueFd fd_;
  std::unique_ptr<Hash> hash_;
  std::uint64_t bytes_ = 0;
};

/// Reads the file from beginning to end.
FileDigest digest_of(const RegularFile& file);

void sync_directory(const std::string& path);
/// Throws SystemError, InvalidArgument for anything but a regular file, ProtocolError if it is longer.
std::string read_small_file(const std::string& path, std::size_t most_bytes);

}  // namespace maniple
