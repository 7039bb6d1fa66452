// A regular file that is read at given places, from any thread.
//
// Not mapped into memory: a file that becomes shorter under a mapping ends the process with SIGBUS, here it is an error that
// says so.
#pragma once

#include <cstddef>
#include <string>

#include "base/unique_fd.h"

namespace maniple {

bool is_readable(const std::string& path) noexcept;

class RegularFile {
 public:
  /// Throws SystemError if it cannot be opened, InvalidArgument if it is a directory, a device, a pipe.
  explicit RegularFile(std::string path);

  const std::string& path() const noexcept { return path_; }
  std::size_t size() const noexcept { return size_; }  ///< when it was opened

  /// Fills `to` with `count` bytes from `offset` on. Throws InvalidArgument if the file ends before, SystemError if it cannot be
  /// read.
  void read(std::size_t offset, void* to, std::size_t count) const;

 private:
  std::string path_;
  UniqueFd fd_;
  std::size_t size_ = 0;
};

}  // namespace maniple
