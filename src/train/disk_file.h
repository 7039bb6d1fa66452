// Files of datasets and checkpoints: RegularFile is read at given places, from any thread; DurableFile is on the disk when it is finished.
//
// Not mapped into memory: a file that becomes shorter under a mapping ends the process with SIGBUS, here it is an error that
// says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/unique_fd.h"

namespace maniple {

bool is_readable(const std::string& path) noexcept;

class RegularFile {
 public:
  /// Throws SystemError if it cannot be opened, InvalidArgument if it is a directory, a device, a pipe.
  explicit RegularFile(std::string path);

  const std::string& path() const noexcept { return path_; }
  std::size_t size() const noexcept { return size_; }  ///< when it was opened
  int descriptor() const noexcept { return fd_.get(); }

  /// Fills `to` with `count` bytes from `offset` on. Throws InvalidArgument if the file ends before, SystemError if it cannot be
  /// read.
  void read(std::size_t offset, void* to, std::size_t count) const;

 private:
  std::string path_;
  UniqueFd fd_;
  std::size_t size_ = 0;
};

struct FileDigest {
  std::uint64_t bytes = 0;
  std::string sha256;  ///< 64 hexadecimal digits
  friend bool operator==(const FileDigest&, const FileDigest&) = default;
};

/// A file whose bytes are on the disk, and hashed, when finish() returns. Creates it; it must not exist. Every failure throws SystemError naming the path: a full disk, say.
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
