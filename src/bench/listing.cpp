#include "bench/listing.h"

#include <fmt/format.h>

#include "bench/case.h"
#include "collective/selection.h"

namespace maniple::bench {
namespace {

std::string indented(const std::string& lines) {
  std::string text = lines.empty() ? "" : "  ";
  for (std::size_t i = 0; i < lines.size(); ++i) {
    text += lines[i];
    if (lines[i] == '\n' && i + 1 < lines.size()) text += "  ";
  }
  return text;
}

}  // namespace

std::string listing(const Site& site) {
  std::string text = "operations\n ";
  for (const Op op : measured_operations()) text += fmt::format(" {}", to_string(op));

  text +=
      "\n\ntransports\n"
      "  auto       loopback between threads of a process, shm inside a host, tcp between hosts\n"
      "  loopback   ranks as threads of one process\n"
      "  shm        shared memory, ranks of one host\n"
      "  tcp        everywhere\n"
      "\nalgorithms\n" +
      indented(list_algorithms());

  text += "\nsystems\n";
  for (const auto& system : systems()) {
    const std::string missing = system->missing(site);
    text += fmt::format("  {:<13} {}\n", system->name(), missing.empty() ? "ready" : "missing: " + missing);
  }
  return text;
}

}  // namespace maniple::bench
