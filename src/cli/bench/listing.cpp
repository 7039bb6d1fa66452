#include "cli/bench/listing.h"

#include <fmt/format.h>

#include "cli/bench/case.h"
#include "collective/mesh_algorithms.h"

namespace maniple::bench {

std::string listing(const Site& site) {
  std::string text = "operations\n ";
  for (const Op op : measured_operations()) text += fmt::format(" {}", to_string(op));

  text += "\n\ntransports\n"
          "  auto       loopback between threads of a process, shm inside a host, tcp between hosts\n"
          "  loopback   ranks as threads of one process\n"
          "  shm        shared memory, ranks of one host\n"
          "  tcp        everywhere\n"
          "\nalgorithms over messages (tcp, and between hosts); inside a host the engine picks by size and memory\n";
  for (const MeshEntry& entry : mesh_algorithms()) {
    text += fmt::format("  {:<15} {:<15} {}\n", to_string(entry.op), entry.name, entry.sentence);
  }

  text += "\nsystems\n";
  for (const auto& system : systems()) {
    const std::string missing = system->missing(site);
    text += fmt::format("  {:<10} {}\n", system->name(), missing.empty() ? "ready" : "missing: " + missing);
  }
  return text;
}

}  // namespace maniple::bench
