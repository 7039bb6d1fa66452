// Files of datasets, weights and checkpoints: RegularFile is read at given places, from any thread; DurableFile is on
// the disk when it has its name.
//
// Not mapped into memory: a file that becomes shorter under a mapping ends the process with SIGBUS, here it is an error
// that says so.
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
  /// Throws SystemError if it cannot be opened, InvalidArgument if it is a directory, a device, a pipe.
  explicit RegularFile(std::string path);

  const std::string& path() const noexcept { return path_; }
  std::size_t size() const noexcept { return size_; }  ///< when it was opened
  int descriptor() const noexcept { return fd_.get(); }

  /// Fills `to` with `count` bytes from `offset` on. Throws InvalidArgument if the file ends before, SystemError if it
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

/// A new file that appears under its name when its bytes are on the disk, in place of an older one. Until then it is
/// PATH.partial-PID, which the destructor removes. Every failure throws SystemError naming the path and what to do.
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

  /// Syncs and closes the file, still under its partial name. Without a hash FileDigest::sha256 is empty.
  FileDigest sync();
  /// sync(), and the file has its name. Its folder is not synced: sync_directory() does that once for all files in it.
  FileDigest finish();
  /// Gives files their names, in this order, after sync() of each; then syncs their folders.
  static void publish(std::deque<DurableFile>& files);

 private:
  void rename();
  [[noreturn]] void fail(const char* action) const;

  std::string path_, partial_;
  ForkGuard guard_;  // in a child of fork() the file is its parent's
  UniqueFd fd_;
  std::unique_ptr<Sha256> hash_;
  std::uint64_t bytes_ = 0;
};

/// Reads the file from beginning to end.
FileDigest digest_of(const RegularFile& file);

void sync_directory(const std::string& path);
/// The directory in which `path` is.
void sync_parent(const std::string& path);
/// Throws SystemError, InvalidArgument for anything but a regular file, ProtocolError if it is longer.
std::string read_small_file(const std::string& path, std::size_t most_bytes);

}  // namespace maniple
