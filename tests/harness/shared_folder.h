// A folder that several runs of one test share. The parent creates it; ranks find it through an environment variable.
//
//   const SharedFolder shared;
//   run_ranks({.n = 2, .as = As::processes, .env = shared.env()},
//             [](Rank&) { write(SharedFolder::here() + "/file"); });
#pragma once

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "harness/run_ranks.h"
#include "harness/temporary_directory.h"

namespace maniple::harness {

class SharedFolder {
 public:
  SharedFolder() {
    if (is_child()) return;
    directory_.emplace();
    ::setenv(kName, directory_->path().c_str(), 1);
  }
  std::vector<std::pair<std::string, std::string>> env() const { return {{kName, here()}}; }
  /// The folder's path, in the parent and in the ranks.
  static std::string here() { return ::getenv(kName); }

 private:
  static constexpr const char* kName = "MANIPLE_TEST_FOLDER";
  std::optional<TemporaryDirectory> directory_;
};

}  // namespace maniple::harness
