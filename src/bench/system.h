// Systems that can be measured: Maniple itself, this machine's limits, and the peers a user might otherwise pick. Each
// is one file and one line in systems().
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench/child.h"
#include "bench/order.h"
#include "bench/scratch_directory.h"
#include "bench/virtual_hosts.h"

namespace maniple::bench {

/// Where a measurement takes place.
struct Site {
  std::string program;  ///< path of this executable
  std::string libexec;  ///< directory of limit_* and peer_*
  ScratchDirectory* scratch = nullptr;
  const VirtualHosts* hosts = nullptr;  ///< null: all ranks on this host

  static Site here(ScratchDirectory& scratch);
  bool spread() const noexcept { return hosts != nullptr; }
};

enum class Role {
  native,
  limit,
  peer,    ///< another library, measured by itself
  engine,  ///< another library underneath Maniple
};

class System {
 public:
  virtual ~System() = default;
  virtual std::string name() const = 0;  ///< as in the rows' backend
  virtual Role role() const = 0;

  /// Empty when it can run here; otherwise what to install: "Gloo (package libgloo-dev)".
  virtual std::string missing(const Site& site) const = 0;

  /// The orders by which it would measure what `wanted` describes: none when it cannot, several when it has variants.
  virtual std::vector<Order> orders(const Order& wanted, const Site& site) const = 0;

  /// The processes that carry an order out; one of them prints the rows.
  virtual std::vector<ChildSpec> process_set(const Order& order, const Site& site) const = 0;
};

std::span<const std::unique_ptr<System>> systems();
const System& system_named(std::string_view name);  ///< throws InvalidArgument

std::unique_ptr<System> make_native_system();
/// Maniple with MANIPLE_CHECKS, MANIPLE_RECORDER and MANIPLE_HEARTBEAT off: what those cost is the difference.
std::unique_ptr<System> make_bare_system();
std::unique_ptr<System> make_limit_system();
std::unique_ptr<System> make_openmpi_system();
std::unique_ptr<System> make_mpich_system();
std::unique_ptr<System> make_gloo_system();
/// Maniple with another backend, "maniple-gloo" and "maniple-mpi".
std::unique_ptr<System> make_plugin_gloo_system();
std::unique_ptr<System> make_plugin_mpi_system();

/// Their orders: they have neither our transports and algorithms nor memory that is shared, and one process for each rank.
std::vector<Order> plugin_work_items(const Order& wanted, const std::string& name);

/// The system that measures a backend: "gloo" is "maniple-gloo", "native" itself.
std::string system_of_backend(const std::string& backend);

/// A secret for one order alone: 32 random bytes in a file that only we can read. Returns the path.
std::string write_secret(const std::string& path);
/// Where the ranks of an order meet.
std::string fresh_rendezvous(const Site& site);

/// The core for a rank: one each while there are enough, none otherwise. Launchers bind their ranks, so we bind those that
/// we start ourselves, our own and the peers' alike; unbound, two ranks that meet on one core halve each other's speed.
std::optional<int> core_for(int rank, int ranks);

/// True when PATH holds such a program.
bool on_path(const std::string& program);

}  // namespace maniple::bench
