// Open MPI and MPICH, through bench/peer_mpi.cpp and their own launchers.
//
// Over virtual hosts their launchers start a daemon on each host by a remote shell. There is no such shell between
// namespaces, so they are given a script that enters the namespace instead.
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "backend/plugin/load.h"
#include "base/system_error.h"
#include "bench/system.h"

namespace maniple::bench {
namespace {

std::string write_remote_shell(const Site& site) {
  const std::string path = site.scratch->fresh("remote-shell");
  std::ofstream script(path);
  // Called as: SCRIPT [options] HOST COMMAND...
  script << "#!/bin/sh\nwhile [ \"${1#-}\" != \"$1\" ]; do shift; done\ncase \"$1\" in\n";
  for (int host = 0; host < site.hosts->count(); ++host) {
    script << fmt::format("  {}) process={} ;;\n", site.hosts->address(host), site.hosts->network(host));
  }
  script << "  *) echo \"no such host: $1\" >&2; exit 1 ;;\nesac\nshift\n"
            "exec nsenter --target \"$process\" --net /bin/sh -c \"$*\"\n";
  script.close();
  if (!script || chmod(path.c_str(), 0700) != 0) throw_system_error("write " + path);
  return path;
}

std::vector<std::string> host_list(const Order& order, const Site& site, const std::string& slots_mark) {
  std::vector<int> slots(static_cast<std::size_t>(site.hosts->count()), 0);
  for (int rank = 0; rank < order.ranks; ++rank)
    ++slots[static_cast<std::size_t>(site.hosts->host_of(rank, order.ranks))];
  std::vector<std::string> result;
  for (int host = 0; host < site.hosts->count(); ++host) {
    const int count = slots[static_cast<std::size_t>(host)];
    if (count > 0) result.push_back(fmt::format("{}{}{}", site.hosts->address(host), slots_mark, count));
  }
  return result;
}

class MpiSystem : public System {
 public:
  Role role() const override { return Role::peer; }

  std::string missing(const Site& site) const override {
    const bool there = access(program(site).c_str(), X_OK) == 0 && on_path(launcher());
    return there ? "" : package();
  }

  std::vector<Order> orders(const Order& wanted, const Site& site) const override {
    if (wanted.transport == "loopback") return {};
    if (wanted.dtype == "float16" || wanted.dtype == "bfloat16" || wanted.dtype == "bool8") return {};
    if (wanted.reduce == "avg" || wanted.reduce == "premul_sum") return {};
    Order order = wanted;
    order.backend = name();
    order.buffer = "ordinary";  // it knows no other, nor our algorithms
    order.algorithm.clear();
    if (site.spread()) {
      order.transport = "tcp";  // neither can tell which ranks of this one machine may share memory
    } else if (wanted.transport != "tcp") {
      order.transport = "shm";
    } else if (!tcp_inside_a_host()) {
      return {};
    }
    return {order};
  }

  std::vector<ChildSpec> process_set(const Order& order, const Site& site) const override {
    ChildSpec spec;
    spec.name = fmt::format("{} with {} ranks", name(), order.ranks);
    spec.argv = {launcher()};
    if (site.spread()) {
      // Its daemons detach themselves; in a process namespace of their own the kernel ends them with their first
      // process.
      spec.argv = {"unshare", "--pid", "--fork", "--kill-child=SIGKILL", launcher()};
    } else {
      spec.death_signal = SIGTERM;  // its launcher then ends the ranks
    }
    add_options(spec, order, site);
    for (const std::string& word : {std::string("-n"), std::to_string(order.ranks)}) spec.argv.push_back(word);
    for (const std::string& word : command(order, site)) spec.argv.push_back(word);
    if (site.spread()) spec.network_of = site.hosts->network(0);
    return {spec};
  }

 protected:
  virtual std::vector<std::string> command(const Order& order, const Site& site) const {
    return {program(site), to_json_text(order)};
  }
  virtual std::string launcher() const = 0;
  virtual std::string package() const = 0;
  virtual bool tcp_inside_a_host() const = 0;
  virtual void add_options(ChildSpec& spec, const Order& order, const Site& site) const = 0;

 private:
  std::string program(const Site& site) const { return site.libexec + "/peer_" + name(); }
};

class OpenMpi : public MpiSystem {
 public:
  std::string name() const override { return "openmpi"; }

 protected:
  std::string launcher() const override { return "mpirun.openmpi"; }
  std::string package() const override { return "Open MPI (packages openmpi-bin, libopenmpi-dev)"; }
  bool tcp_inside_a_host() const override { return true; }

  void add_options(ChildSpec& spec, const Order& order, const Site& site) const override {
    const auto add = [&](std::initializer_list<std::string> words) { spec.argv.insert(spec.argv.end(), words); };
    add({"--allow-run-as-root", "--oversubscribe", "--mca", "orte_tmpdir_base", site.scratch->fresh("openmpi")});
    if (site.spread() || order.transport == "tcp") {
      add({"--mca", "pml", "ob1", "--mca", "btl", "tcp,self"});
      add({"--mca", "btl_tcp_if_include", site.spread() ? VirtualHosts::kInterface : "lo"});
    }
    if (!site.spread()) return;
    add({"--mca", "plm_rsh_agent", write_remote_shell(site), "--mca", "plm_rsh_no_tree_spawn", "1"});
    add({"--mca", "oob_tcp_if_include", VirtualHosts::kInterface});
    add({"--host", fmt::format("{}", fmt::join(host_list(order, site, ":"), ","))});
  }
};

class Mpich final : public MpiSystem {
 public:
  std::string name() const override { return "mpich"; }

 protected:
  std::string launcher() const override { return "mpirun.mpich"; }
  std::string package() const override { return "MPICH (packages mpich, libmpich-dev)"; }
  bool tcp_inside_a_host() const override { return false; }

  void add_options(ChildSpec& spec, const Order& order, const Site& site) const override {
    if (!site.spread()) return;
    const auto add = [&](std::initializer_list<std::string> words) { spec.argv.insert(spec.argv.end(), words); };
    add({"-launcher", "ssh", "-launcher-exec", write_remote_shell(site), "-iface", VirtualHosts::kInterface});
    add({"-hosts", fmt::format("{}", fmt::join(host_list(order, site, ":"), ","))});
    // It would find out that the hosts are one machine after all, and share memory between them.
    spec.environment = {{"MPIR_CVAR_NOLOCAL", "1"},
                        {"MPIR_CVAR_CH3_NOLOCAL", "1"},
                        {"UCX_TLS", "tcp,self"},
                        {"UCX_NET_DEVICES", VirtualHosts::kInterface},
                        {"FI_PROVIDER", "tcp"}};
  }
};

/// Maniple's own workers, started by Open MPI's launcher.
class PluginMpi final : public OpenMpi {
 public:
  std::string name() const override { return "maniple-mpi"; }
  Role role() const override { return Role::engine; }
  std::string missing(const Site&) const override {
    const std::string engine = missing_plugin("openmpi");
    return engine.empty() && !on_path(launcher()) ? package() : engine;
  }

  std::vector<Order> orders(const Order& wanted, const Site&) const override {
    return plugin_work_items(wanted, name());
  }

 protected:
  std::vector<std::string> command(const Order& order, const Site& site) const override {
    return {"env",        "MANIPLE_MPI=openmpi", "MANIPLE_SECRET_FILE=" + write_secret(site.scratch->fresh("secret")),
            site.program, "bench-worker",        to_json_text(order),
            "0",          fresh_rendezvous(site)};
  }
};

}  // namespace

std::unique_ptr<System> make_plugin_mpi_system() { return std::make_unique<PluginMpi>(); }
std::unique_ptr<System> make_openmpi_system() { return std::make_unique<OpenMpi>(); }
std::unique_ptr<System> make_mpich_system() { return std::make_unique<Mpich>(); }

}  // namespace maniple::bench
