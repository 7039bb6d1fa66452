// Hosts that are network namespaces: each has one interface, eth0, plugged into a bridge in a namespace of its own.
//
//   host 0: eth0 10.77.0.1 ---- port0 ---+
//   host 1: eth0 10.77.0.2 ---- port1 ---+--- bridge      (all addresses exist inside these namespaces only)
//
// Names hold the pid, so several programs can have networks at a time; those whose program was killed are removed by the
// next one that makes a network.
#pragma once

#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace maniple::harness {

class Network {
 public:
  Network(int hosts, double rate_mbit, double queue_ms = 50);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  /// Why no network can be made here; empty if it can.
  static std::string why_not();

  static std::string address(int host);
  int hosts() const noexcept { return static_cast<int>(names_.size()); }
  const std::string& name_of(int host) const { return names_.at(static_cast<std::size_t>(host)); }

  /// state: "nomaster" (the bridge forgets the port: silence), "down" (the cable is pulled), "up", "master bridge".
  void set_link(int host, const std::string& state);

  /// Bytes that the host has sent so far.
  long long sent_bytes(int host) const;

 private:
  void remove() noexcept;

  std::string bridge_;
  std::vector<std::string> names_;
};

/// While it lives, the calling thread (and what it starts) is inside the namespace.
class InsideNamespace {
 public:
  explicit InsideNamespace(const std::string& name);
  ~InsideNamespace();
  InsideNamespace(const InsideNamespace&) = delete;
  InsideNamespace& operator=(const InsideNamespace&) = delete;

 private:
  UniqueFd home_;
};

}  // namespace maniple::harness
