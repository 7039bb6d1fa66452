// Hosts that are network namespaces, joined by a bridge in a namespace of its own:
//
//   host 0: eth0 10.77.0.1 ---- port0 ---+
//   host 1: eth0 10.77.0.2 ---- port1 ---+--- bridge      (all addresses exist inside these namespaces only)
//
// The namespaces have no names. Each lives as long as a descriptor of this process, so the kernel removes everything
// even when the process is killed, and several programs can have networks at a time. Needs root. Used by `maniple bench
// --hosts` and by the tests.
#pragma once

#include <string>
#include <vector>

#include "comm/base/unique_fd.h"

namespace maniple::bench {

class VirtualNetwork {
 public:
  /// `rate` shapes the link of each host in both directions ("1gbit", as tc spells it); empty: unshaped. A shaped link
  /// queues what it cannot send at once for at most `queue_ms`. Throws SystemError, or Error with what `ip` or `tc`
  /// printed.
  explicit VirtualNetwork(int hosts, const std::string& rate = {}, double queue_ms = 50);

  /// Why no network can be made here; empty if it can.
  static std::string why_not();

  static std::string address(int host);
  static constexpr const char* kInterface = "eth0";

  int hosts() const noexcept { return static_cast<int>(hosts_.size()); }
  /// The namespace of a host, for setns.
  int descriptor(int host) const { return hosts_.at(static_cast<std::size_t>(host)).get(); }
  /// The same for other programs while this process lives: `nsenter --net=PATH`.
  std::string path(int host) const;
  /// Ranks in blocks: the first host has the first ranks.
  int host_of(int rank, int ranks) const noexcept {
    return static_cast<int>(static_cast<long>(rank) * hosts() / ranks);
  }

  /// state: "nomaster" (the bridge forgets the port: silence), "down" (the cable is pulled), "up", "master bridge".
  void set_link(int host, const std::string& state);

  /// Runs a command, words separated by blanks, in the namespace of a host.
  void run_on(int host, const std::string& command) const;

  /// A script that starts commands on these hosts as a remote shell does, for the launchers of others; called as
  /// PATH [options] ADDRESS COMMAND...
  void write_remote_shell(const std::string& path) const;

 private:
  UniqueFd bridge_;
  std::vector<UniqueFd> hosts_;
};

/// While it lives, the calling thread, and what it starts, is in that network namespace.
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
