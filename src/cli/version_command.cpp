#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/command.h"

namespace maniple::cli {

std::function<int()> declare_version(CLI::App&) {
  return [] {
    fmt::print("maniple {}\n", MANIPLE_VERSION);
    return 0;
  };
}

}  // namespace maniple::cli
