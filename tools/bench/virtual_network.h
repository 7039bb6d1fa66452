// Simulated hosts: network namespaces joined by a bridge, which has a namespace of its own.
//
//   host 0: eth0 10.77.0.1 ---- port0 ---+
//   host 1: eth0 10.77.0.2 ---- port1 ---+--- bridge      (all addresses exist inside these namespaces only)
//
// The namespaces are unnamed and exist as long as this process holds their descriptors. The kernel therefore removes
// everything even when the process is killed, and several programs can have networks at a time. Needs root. Used by
// `maniple bench --hosts` and by the tests.
#pragma once

#include <string>
#include <vector>

#include "comm/base/unique_fd.h"

namespace maniple::bench {

class VirtualNetwork {
 public:
  /// `rate` shapes each host's link in both directions ("1gbit", in tc's notation); empty: unshaped. A shaped link
  /// queues packets for at most `queue_ms`. Throws SystemError, or Error with the output of `ip` or `tc`.
  explicit VirtualNetwork(int hosts, const std::string& rate = {}, double queue_ms = 50);

  /// The reason why no network can be created here; empty if one can.
  static std::string why_not();

  static std::string address(int host);
  static constexpr const char* kInterface = "eth0";

  int hosts() const noexcept { return static_cast<int>(hosts_.size()); }
  /// A host's namespace, for setns.
  int descriptor(int host) const { return hosts_.at(static_cast<std::size_t>(host)).get(); }
  /// A path to the namespace for other programs, valid while this process runs: `nsenter --net=PATH`.
  std::string path(int host) const;
  /// Ranks in blocks: the first host has the first ranks.
  int host_of(int rank, int ranks) const noexcept {
    return static_cast<int>(static_cast<long>(rank) * hosts() / ranks);
  }

  /// `state`: "nomaster" (detached from the bridge: silence), "down" (like a pulled cable), "up", "master bridge".
  void set_link(int host, const std::string& state);

  /// Runs a command, words separated by blanks, in a host's namespace.
  void run_on(int host, const std::string& command) const;

  /// Writes a script that starts commands on these hosts like a remote shell, for other launchers. Called as
  /// PATH [options] ADDRESS COMMAND...
  void write_remote_shell(const std::string& path) const;

 private:
  UniqueFd bridge_;
  std::vector<UniqueFd> hosts_;
};

/// Moves the calling thread, and the processes it starts, into a network namespace until destroyed.
class InsideNamespace {
 public:
  explicit InsideNamespace(int descriptor);
  ~InsideNamespace();
  InsideNamespace(const InsideNamespace&) = delete;
  InsideNamespace& operator=(const InsideNamespace&) = delete;

 private:
  UniqueFd home_;
};

}  // namespace maniple::bench
