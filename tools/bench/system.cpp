#include "tools/bench/system.h"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/host.h"
#include "comm/base/system_error.h"
#include "comm/collective/algorithms.h"

namespace maniple::bench {
namespace {

constexpr int kSecretBytes = 32;
constexpr int kPort = 29400;  // every port is free in new network namespaces

std::string indented(const std::string& lines) {
  std::string text = lines.empty() ? "" : "  ";
  for (std::size_t i = 0; i < lines.size(); ++i) {
    text += lines[i];
    if (lines[i] == '\n' && i + 1 < lines.size()) text += "  ";
  }
  return text;
}

}  // namespace

ScratchDirectory::ScratchDirectory()
    : path_((std::filesystem::temp_directory_path() / "maniple-bench-XXXXXX").string()) {
  if (mkdtemp(path_.data()) == nullptr) throw_system_error("mkdtemp " + path_);
}

ScratchDirectory::~ScratchDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

Testbed Testbed::here(ScratchDirectory& scratch) {
  Testbed testbed;
  const auto program = std::filesystem::read_symlink("/proc/self/exe");
  testbed.program = program.string();
  testbed.libexec = (program.parent_path().parent_path() / "libexec" / "maniple").string();
  testbed.scratch = &scratch;
  return testbed;
}

std::span<const std::unique_ptr<System>> systems() {
  static const std::array<std::unique_ptr<System>, 8> all = {
      make_native_system(), make_bare_system(), make_limit_system(),       make_openmpi_system(),
      make_mpich_system(),  make_gloo_system(), make_plugin_gloo_system(), make_plugin_mpi_system()};
  return all;
}

std::string system_of_backend(const std::string& backend) {
  return backend == "native" ? backend : "maniple-" + backend;
}

std::vector<WorkItem> plugin_work_items(const WorkItem& requested, const std::string& name) {
  if (requested.transport == "loopback") return {};
  WorkItem item = requested;
  item.backend = name;
  item.buffer = "ordinary";
  item.transport = "auto";
  item.algorithm.clear();
  return {item};
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

std::string write_secret(const std::string& path) {
  std::array<unsigned char, kSecretBytes> secret;
  if (getrandom(secret.data(), secret.size(), 0) != kSecretBytes) throw_system_error("getrandom");
  const UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file || write(file.get(), secret.data(), secret.size()) != kSecretBytes) throw_system_error("write " + path);
  return path;
}

std::string new_rendezvous(const Testbed& testbed) {
  return testbed.several_hosts() ? fmt::format("tcp://{}:{}", VirtualNetwork::address(0), kPort)
                                 : "file://" + testbed.scratch->new_path("rendezvous");
}

std::string listing(const Testbed& testbed) {
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
    const std::string missing = system->missing(testbed);
    text += fmt::format("  {:<13} {}\n", system->name(), missing.empty() ? "ready" : "missing: " + missing);
  }
  return text;
}

}  // namespace maniple::bench
