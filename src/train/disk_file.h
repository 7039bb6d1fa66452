// Files of datasets, weights and checkpoints. RegularFile is read at given offsets, from any thread. DurableFile is on
// the disk by the time it appears under its name.
//
// Files are not mapped into memory: if a mapped file is truncated, access ends the process with SIGBUS; a read reports
// an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>

#include "comm/base/fork_guard.h"
#include "comm/base/unique_fd.h"

namespace maniple {

class Sha256;

bool is_readable(const std::string& path) noexcept;

class RegularFile {
 public:
  /// Throws SystemError if the file cannot be opened, InvalidArgument if it is a directory, a device or a pipe.
  explicit RegularFile(std::string path);

  const std::string& path() const noexcept { return path_; }
  std::size_t size() const noexcept { return size_; }  ///< when it was opened
  int descriptor() const noexcept { return fd_.get(); }

  /// Fills `to` with `count` bytes at `offset`. Throws InvalidArgument if the file ends before that, SystemError if it
  /// cannot be read.
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

/// Writes a new file that replaces PATH only once its bytes are on the disk. Until then the file is PATH.partial-PID,
/// which the destructor removes. Every failure throws SystemError with the path and what to do.
///
///   DurableFile file(path);
///   file.write(text);
///   file.finish();
class DurableFile {
 public:
  enum class Hash { none, sha256 };
  explicit DurableFile(std::string path, Hash hash = Hash::sha256);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }

  /// Syncs and closes the file, still under its partial name. With Hash::none, FileDigest::sha256 is empty.
  FileDigest sync();
  /// sync(), then renames the file to its name. Does not sync the folder: sync_directory() does, once for all files in
  /// it.
  FileDigest finish();
  /// Renames the files to their names, in this order, after sync() of each; then syncs their folders.
  static void publish(std::deque<DurableFile>& files);

 private:
  void rename();
  [[noreturn]] void fail(const char* action) const;

  std::string path_, partial_;
  ForkGuard guard_;  // in a child of fork() the file belongs to the parent
  UniqueFd fd_;
  std::unique_ptr<Sha256> hash_;
  std::uint64_t bytes_ = 0;
};

FileDigest digest_of(const RegularFile& file);

void sync_directory(const std::string& path);
/// Syncs the directory that contains `path`.
void sync_parent(const std::string& path);
/// Throws SystemError, InvalidArgument for anything but a regular file, ProtocolError if the file is longer.
std::string read_small_file(const std::string& path, std::size_t most_bytes);

}  // namespace maniple
