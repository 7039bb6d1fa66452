#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "backend/backend.h"
#include "cli/command.h"

namespace maniple::cli {
namespace {

int print_backends() {
  fmt::print("{:<8} {:<8} {:<68} how to get it\n", "backend", "state", "what it is");
  for (const BackendEntry& entry : backends()) {
    const std::string missing = entry.missing();
    fmt::print("{:<8} {:<8} {:<68} {}\n", entry.name, missing.empty() ? "here" : "missing", entry.sentence,
               missing.empty() ? "-" : missing);
  }
  return 0;
}

}  // namespace

std::function<int()> declare_backends(CLI::App&) { return print_backends; }

}  // namespace maniple::cli
