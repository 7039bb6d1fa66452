#include "bench/system.h"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include <fmt/format.h>

#include "base/check.h"
#include "topology/core_set.h"

namespace maniple::bench {

Site Site::here(ScratchDirectory& scratch) {
  Site site;
  const auto program = std::filesystem::read_symlink("/proc/self/exe");
  site.program = program.string();
  site.libexec = (program.parent_path().parent_path() / "libexec" / "maniple").string();
  site.scratch = &scratch;
  return site;
}

std::span<const std::unique_ptr<System>> systems() {
  static const std::array<std::unique_ptr<System>, 8> all = {
      make_native_system(), make_bare_system(), make_limit_system(),        make_openmpi_system(),
      make_mpich_system(),  make_gloo_system(), make_plugin_gloo_system(), make_plugin_mpi_system()};
  return all;
}

std::string system_of_backend(const std::string& backend) {
  return backend == "native" ? backend : "maniple-" + backend;
}

std::vector<Order> plugin_work_items(const Order& wanted, const std::string& name) {
  if (wanted.transport == "loopback") return {};
  Order order = wanted;
  order.backend = name;
  order.buffer = "ordinary";
  order.transport = "auto";
  order.algorithm.clear();
  return {order};
}

const System& system_named(std::string_view name) {
  for (const auto& system : systems()) {
    if (system->name() == name) return *system;
  }
  throw InvalidArgument(fmt::format("no system is named \"{}\"; `maniple bench --list` shows them", name));
}

std::optional<int> core_for(int rank, int ranks) {
  const std::vector<int> cores = CoreSet::of_this_process().list();
  if (static_cast<std::size_t>(ranks) > cores.size()) return std::nullopt;
  return cores[static_cast<std::size_t>(rank)];
}

bool on_path(const std::string& program) {
  const char* path = std::getenv("PATH");
  std::istringstream directories(path != nullptr ? path : "/usr/bin:/bin");
  for (std::string directory; std::getline(directories, directory, ':');) {
    if (access((directory + "/" + program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

}  // namespace maniple::bench
