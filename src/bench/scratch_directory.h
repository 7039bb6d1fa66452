// A private directory (0700) that goes with its owner.
#pragma once

#include <filesystem>
#include <string>

#include "base/system_error.h"

namespace maniple::bench {

class ScratchDirectory {
 public:
  ScratchDirectory() : path_((std::filesystem::temp_directory_path() / "maniple-bench-XXXXXX").string()) {
    if (mkdtemp(path_.data()) == nullptr) throw_system_error("mkdtemp " + path_);
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  std::string file(const std::string& name) const { return path_ + "/" + name; }

  /// A name in it that was never given before.
  std::string fresh(const std::string& stem) { return file(stem + "-" + std::to_string(++counter_)); }

 private:
  std::string path_;
  int counter_ = 0;
};

}  // namespace maniple::bench
