// The systems that Maniple is compared with: Open MPI, MPICH, Gloo, and the limits of the machine.
//
// Open MPI and MPICH run bench/peer_mpi.cpp under their own launchers. Across virtual hosts their launchers start a
// daemon on each host through a remote shell. Network namespaces lack a remote shell, so the launchers get a script
// that enters the namespace instead.
#include <unistd.h>

#include <filesystem>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/backend/plugin/load.h"
#include "tools/bench/system.h"

namespace maniple::bench {
namespace {

/// Writes the script that replaces the launchers' remote shell between namespaces.
std::string remote_shell(const Testbed& testbed) {
  const std::string path = testbed.scratch->new_path("remote-shell");
  testbed.network->write_remote_shell(path);
  return path;
}

std::vector<std::string> host_list(const WorkItem& item, const Testbed& testbed, const std::string& slots_mark) {
  std::vector<int> slots(static_cast<std::size_t>(testbed.network->hosts()), 0);
  for (int rank = 0; rank < item.ranks; ++rank)
    ++slots[static_cast<std::size_t>(testbed.network->host_of(rank, item.ranks))];
  std::vector<std::string> result;
  for (int host = 0; host < testbed.network->hosts(); ++host) {
    const int count = slots[static_cast<std::size_t>(host)];
    if (count > 0) result.push_back(fmt::format("{}{}{}", testbed.network->address(host), slots_mark, count));
  }
  return result;
}

class MpiSystem : public System {
 public:
  Role role() const override { return Role::peer; }

  std::string missing(const Testbed& testbed) const override {
    const bool there = access(program(testbed).c_str(), X_OK) == 0 && on_path(launcher());
    return there ? "" : package();
  }

  std::vector<WorkItem> work_items(const WorkItem& requested, const Testbed& testbed) const override {
    if (requested.transport == "loopback") return {};
    if (requested.dtype == "float16" || requested.dtype == "bfloat16" || requested.dtype == "bool8") return {};
    if (requested.reduce == "avg" || requested.reduce == "premul_sum") return {};
    WorkItem item = requested;
    item.backend = name();
    item.buffer = "ordinary";  // it knows no other, nor our algorithms
    item.algorithm.clear();
    if (testbed.several_hosts()) {
      item.transport = "tcp";  // it cannot detect which ranks on this one machine may share memory
    } else if (requested.transport != "tcp") {
      item.transport = "shm";
    } else if (!tcp_inside_a_host()) {
      return {};
    }
    return {item};
  }

  std::vector<ChildSpec> processes(const WorkItem& item, const Testbed& testbed) const override {
    ChildSpec spec;
    spec.name = fmt::format("{} with {} ranks", name(), item.ranks);
    spec.argv = {launcher()};
    if (testbed.several_hosts()) {
      // Its daemons detach themselves. In a pid namespace of their own, the kernel ends them with their first process.
      spec.argv = {"unshare", "--pid", "--fork", "--kill-child=SIGKILL", launcher()};
    } else {
      spec.death_signal = SIGTERM;  // its launcher then ends the ranks
    }
    add_options(spec, item, testbed);
    for (const std::string& word : {std::string("-n"), std::to_string(item.ranks)}) spec.argv.push_back(word);
    for (const std::string& word : command(item, testbed)) spec.argv.push_back(word);
    if (testbed.several_hosts()) spec.network = testbed.network->descriptor(0);
    return {spec};
  }

 protected:
  virtual std::vector<std::string> command(const WorkItem& item, const Testbed& testbed) const {
    return {program(testbed), to_json_text(item)};
  }
  virtual std::string launcher() const = 0;
  virtual std::string package() const = 0;
  virtual bool tcp_inside_a_host() const = 0;
  virtual void add_options(ChildSpec& spec, const WorkItem& item, const Testbed& testbed) const = 0;

 private:
  std::string program(const Testbed& testbed) const { return testbed.libexec + "/peer_" + name(); }
};

class OpenMpi : public MpiSystem {
 public:
  std::string name() const override { return "openmpi"; }

 protected:
  std::string launcher() const override { return "mpirun.openmpi"; }
  std::string package() const override { return "Open MPI (packages openmpi-bin, libopenmpi-dev)"; }
  bool tcp_inside_a_host() const override { return true; }

  void add_options(ChildSpec& spec, const WorkItem& item, const Testbed& testbed) const override {
    const auto add = [&](std::initializer_list<std::string> words) { spec.argv.insert(spec.argv.end(), words); };
    add({"--allow-run-as-root", "--oversubscribe", "--mca", "orte_tmpdir_base", testbed.scratch->new_path("openmpi")});
    if (testbed.several_hosts() || item.transport == "tcp") {
      add({"--mca", "pml", "ob1", "--mca", "btl", "tcp,self"});
      add({"--mca", "btl_tcp_if_include", testbed.several_hosts() ? VirtualNetwork::kInterface : "lo"});
    }
    if (!testbed.several_hosts()) return;
    add({"--mca", "plm_rsh_agent", remote_shell(testbed), "--mca", "plm_rsh_no_tree_spawn", "1"});
    add({"--mca", "oob_tcp_if_include", VirtualNetwork::kInterface});
    add({"--host", fmt::format("{}", fmt::join(host_list(item, testbed, ":"), ","))});
  }
};

class Mpich final : public MpiSystem {
 public:
  std::string name() const override { return "mpich"; }

 protected:
  std::string launcher() const override { return "mpirun.mpich"; }
  std::string package() const override { return "MPICH (packages mpich, libmpich-dev)"; }
  bool tcp_inside_a_host() const override { return false; }

  void add_options(ChildSpec& spec, const WorkItem& item, const Testbed& testbed) const override {
    if (!testbed.several_hosts()) return;
    const auto add = [&](std::initializer_list<std::string> words) { spec.argv.insert(spec.argv.end(), words); };
    add({"-launcher", "ssh", "-launcher-exec", remote_shell(testbed), "-iface", VirtualNetwork::kInterface});
    add({"-hosts", fmt::format("{}", fmt::join(host_list(item, testbed, ":"), ","))});
    // Otherwise it would detect that the hosts are one machine and share memory between them.
    spec.environment = {{"MPIR_CVAR_NOLOCAL", "1"},
                        {"MPIR_CVAR_CH3_NOLOCAL", "1"},
                        {"UCX_TLS", "tcp,self"},
                        {"UCX_NET_DEVICES", VirtualNetwork::kInterface},
                        {"FI_PROVIDER", "tcp"}};
  }
};

/// Maniple's workers, started by Open MPI's launcher.
class PluginMpi final : public OpenMpi {
 public:
  std::string name() const override { return "maniple-mpi"; }
  Role role() const override { return Role::plugin; }
  std::string missing(const Testbed&) const override {
    const std::string plugin = missing_plugin("openmpi");
    return plugin.empty() && !on_path(launcher()) ? package() : plugin;
  }

  std::vector<WorkItem> work_items(const WorkItem& requested, const Testbed&) const override {
    return plugin_work_items(requested, name());
  }

 protected:
  std::vector<std::string> command(const WorkItem& item, const Testbed& testbed) const override {
    return {"env",
            "MANIPLE_MPI=openmpi",
            "MANIPLE_SECRET_FILE=" + write_secret(testbed.scratch->new_path("secret")),
            testbed.program,
            "bench-worker",
            to_json_text(item),
            "0",
            new_rendezvous(testbed)};
  }
};

}  // namespace

std::unique_ptr<System> make_plugin_mpi_system() { return std::make_unique<PluginMpi>(); }
std::unique_ptr<System> make_openmpi_system() { return std::make_unique<OpenMpi>(); }
std::unique_ptr<System> make_mpich_system() { return std::make_unique<Mpich>(); }

// Gloo, through bench/peer_gloo.cpp. `maniple bench` starts its ranks.

namespace {

class GlooSystem final : public System {
 public:
  std::string name() const override { return "gloo"; }
  Role role() const override { return Role::peer; }

  std::string missing(const Testbed& testbed) const override {
    return access(program(testbed).c_str(), X_OK) == 0 ? "" : "Gloo (package libgloo-dev)";
  }

  std::vector<WorkItem> work_items(const WorkItem& requested, const Testbed&) const override {
    const bool done = requested.op == "all_reduce" || requested.op == "broadcast" || requested.op == "all_gather" ||
                      requested.op == "barrier";
    if (!done || requested.dtype != "float32" || requested.reduce != "sum") return {};
    if (requested.transport == "loopback") return {};
    WorkItem item = requested;
    item.buffer = "ordinary";  // it knows no other, nor our algorithms
    item.algorithm.clear();
    item.backend = name();
    item.transport = "tcp";
    return {item};
  }

  std::vector<ChildSpec> processes(const WorkItem& item, const Testbed& testbed) const override {
    const std::string store_directory = testbed.scratch->new_path("gloo");
    std::filesystem::create_directory(store_directory);
    std::vector<ChildSpec> result;
    for (int rank = 0; rank < item.ranks; ++rank) {
      ChildSpec spec;
      spec.name = fmt::format("gloo rank {}", rank);
      const int host = testbed.several_hosts() ? testbed.network->host_of(rank, item.ranks) : 0;
      const std::string address = testbed.several_hosts() ? testbed.network->address(host) : "127.0.0.1";
      spec.argv = {program(testbed), to_json_text(item), std::to_string(rank), store_directory, address};
      spec.core = core_for(rank, item.ranks);
      if (testbed.several_hosts()) spec.network = testbed.network->descriptor(host);
      result.push_back(std::move(spec));
    }
    return result;
  }

 private:
  static std::string program(const Testbed& testbed) { return testbed.libexec + "/peer_gloo"; }
};

}  // namespace

std::unique_ptr<System> make_gloo_system() { return std::make_unique<GlooSystem>(); }

// The machine's limits: bare programs that use no library (bench/limit_*.cpp).

namespace {

class LimitSystem final : public System {
 public:
  std::string name() const override { return "limit"; }
  Role role() const override { return Role::limit; }

  std::string missing(const Testbed& testbed) const override {
    const bool there = access((testbed.libexec + "/limit_core").c_str(), X_OK) == 0;
    return there ? "" : "limits (programs of this project: build with -DMANIPLE_BENCH=ON)";
  }

  std::vector<WorkItem> work_items(const WorkItem& requested, const Testbed& testbed) const override {
    WorkItem item = requested;
    item.backend = name();
    item.transport = "shm";
    item.algorithm.clear();
    if (requested.op == "limit") return {item};
    const bool done_here = requested.op == "all_reduce" && requested.dtype == "float32" && requested.reduce == "sum";
    const bool comparable = requested.transport == "auto" || requested.transport == "shm";
    if (!done_here || !comparable || testbed.several_hosts() || requested.ranks < 2) return {};
    return {item};
  }

  std::vector<ChildSpec> processes(const WorkItem& item, const Testbed& testbed) const override {
    ChildSpec spec;
    const std::string program = item.op == "limit" ? "limit_core" : "limit_" + item.buffer;
    spec.name = program;
    spec.argv = {testbed.libexec + "/" + program, to_json_text(item)};
    return {spec};
  }
};

}  // namespace

std::unique_ptr<System> make_limit_system() { return std::make_unique<LimitSystem>(); }

}  // namespace maniple::bench
