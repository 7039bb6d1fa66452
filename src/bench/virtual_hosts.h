// Hosts made of network namespaces, joined by a switch (a bridge in a namespace of its own):
//
//   host 0  eth0 10.77.0.1 ---- port0 [switch] port1 ---- 10.77.0.2 eth0  host 1
//
// The namespaces have no names: each lives as long as a sleeping child process of ours, so the kernel removes
// everything even when this process is killed. Our own network is not touched. Needs root.
#pragma once

#include <string>
#include <vector>

#include "bench/child.h"
#include "bench/interrupt.h"

namespace maniple::bench {

class VirtualHosts {
 public:
  /// `rate` shapes each host's link in both directions ("1gbit", as tc spells it); empty: as fast as it goes.
  VirtualHosts(int count, const std::string& rate, const InterruptWatch& watch);

  int count() const noexcept { return static_cast<int>(hosts_.size()); }
  std::string address(int host) const;
  pid_t network(int host) const { return hosts_.at(static_cast<std::size_t>(host)).pid(); }

  /// Ranks in blocks: the first host has the first ranks.
  int host_of(int rank, int ranks) const noexcept { return rank * count() / ranks; }

  static constexpr const char* kInterface = "eth0";

 private:
  void connect(int host, const std::string& rate, const InterruptWatch& watch);

  Child switch_;
  std::vector<Child> hosts_;
};

}  // namespace maniple::bench
