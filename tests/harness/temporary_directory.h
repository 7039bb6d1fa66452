// A new directory that the destructor removes with its contents.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <system_error>

#include "comm/base/files.h"

namespace maniple::harness {

class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::string& parent = temporary_folder()) {
    std::string pattern = parent + "/maniple-test-XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) throw std::system_error(errno, std::generic_category(), pattern);
    path_ = pattern;
  }
  ~TemporaryDirectory() { remove_tree(path_); }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
};

}  // namespace maniple::harness
