// The systems that can be measured: Maniple itself, this machine's limits, and the peers a user might choose instead.
// Each system is listed by one line in systems().
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/bench/process_set.h"
#include "tools/bench/virtual_network.h"
#include "tools/bench/work_item.h"

namespace maniple::bench {

/// A private directory (mode 0700) that the destructor removes.
class ScratchDirectory {
 public:
  ScratchDirectory();
  ~ScratchDirectory();
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  std::string file(const std::string& name) const { return path_ + "/" + name; }

  /// A new, unique path in the directory.
  std::string new_path(const std::string& stem) { return file(stem + "-" + std::to_string(++counter_)); }

 private:
  std::string path_;
  int counter_ = 0;
};

/// The programs, the directory for files, and the hosts of a measurement.
struct Testbed {
  std::string program;  ///< path of this executable
  std::string libexec;  ///< directory of limit_* and peer_*
  ScratchDirectory* scratch = nullptr;
  const VirtualNetwork* network = nullptr;  ///< null: all ranks on this host

  static Testbed here(ScratchDirectory& scratch);
  bool several_hosts() const noexcept { return network != nullptr; }
};

enum class Role {
  native,
  limit,
  peer,    ///< another library, measured by itself
  plugin,  ///< another library as a backend of Maniple
};

/// One library, or a variant of it, that can be measured.
class System {
 public:
  virtual ~System() = default;
  virtual std::string name() const = 0;  ///< the value of Row::backend
  virtual Role role() const = 0;

  /// Empty if it can run here; otherwise what to install: "Gloo (package libgloo-dev)".
  virtual std::string missing(const Testbed& testbed) const = 0;

  /// The items to measure for a requested item: none if the system cannot measure it, several if it has variants.
  virtual std::vector<WorkItem> work_items(const WorkItem& requested, const Testbed& testbed) const = 0;

  /// The processes that measure an item; one of them prints the rows.
  virtual std::vector<ChildSpec> processes(const WorkItem& item, const Testbed& testbed) const = 0;
};

std::span<const std::unique_ptr<System>> systems();
const System& system_named(std::string_view name);  ///< throws InvalidArgument

std::unique_ptr<System> make_native_system();
/// Maniple with MANIPLE_CHECKS, MANIPLE_RECORDER and MANIPLE_HEARTBEAT off, to measure their cost.
std::unique_ptr<System> make_bare_system();
std::unique_ptr<System> make_limit_system();
std::unique_ptr<System> make_openmpi_system();
std::unique_ptr<System> make_mpich_system();
std::unique_ptr<System> make_gloo_system();
/// Maniple with another backend: "maniple-gloo" and "maniple-mpi".
std::unique_ptr<System> make_plugin_gloo_system();
std::unique_ptr<System> make_plugin_mpi_system();

/// The items of a plugin system, which lacks Maniple's transports, algorithms and registered memory, and runs one
/// process per rank.
std::vector<WorkItem> plugin_work_items(const WorkItem& requested, const std::string& name);

/// The system that measures a backend: "maniple-gloo" for "gloo", "native" for "native".
std::string system_of_backend(const std::string& backend);

/// A secret for one work item: 32 random bytes in a file that only this user can read. Returns the path.
std::string write_secret(const std::string& path);
/// An init_method for the ranks of one work item.
std::string new_rendezvous(const Testbed& testbed);

/// The core for a rank: one core per rank if there are enough, otherwise none. Launchers bind their ranks, so `maniple
/// bench` binds the ranks it starts itself, Maniple's and the peers' alike. Unbound, two ranks might share a core and
/// halve each other's speed.
std::optional<int> core_for(int rank, int ranks);

/// Whether PATH contains the program.
bool on_path(const std::string& program);

/// The output of `maniple bench --list`.
std::string listing(const Testbed& testbed);

/// Runs one rank of a measurement of Maniple, in a `bench-worker` process: initialises as `rank` with the init_method
/// `rendezvous`, measures, and prints rows on rank 0. With the transport loopback all ranks run as threads, and `rank`
/// and `rendezvous` are ignored.
void run_worker(const WorkItem& item, int rank, const std::string& rendezvous);

}  // namespace maniple::bench
