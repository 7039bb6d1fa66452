#include "bench/virtual_hosts.h"

#include <unistd.h>

#include <sstream>

#include <fmt/format.h>

#include "base/check.h"
#include "bench/process_set.h"

namespace maniple::bench {
namespace {

ChildSpec sleeper(const std::string& name) {
  ChildSpec spec;
  spec.name = name;
  spec.argv = {"sleep", "infinity"};
  spec.new_network = true;
  return spec;
}

ChildSpec checked(const std::string& name) {
  MANIPLE_REQUIRE(geteuid() == 0, "--hosts makes network namespaces, which needs root");
  return sleeper(name);
}

/// Runs a command line, without quoting, in the network of `network`.
void in_network(pid_t network, const std::string& line, const InterruptWatch& watch) {
  ChildSpec spec;
  std::istringstream words(line);
  for (std::string word; words >> word;) spec.argv.push_back(word);
  spec.network_of = network;
  run_tool(std::move(spec), watch);
}

/// A bucket that holds the largest segment the stack hands down (64 KiB), several times over, but far less than a row.
std::string shaping(const std::string& device, const std::string& rate) {
  return fmt::format("tc qdisc add dev {} root tbf rate {} burst 256kb latency 50ms", device, rate);
}

}  // namespace

VirtualHosts::VirtualHosts(int count, const std::string& rate, const InterruptWatch& watch)
    : switch_(checked("switch")) {
  MANIPLE_REQUIRE(count >= 2 && count <= 64, "--hosts is {}; expected 2 to 64", count);
  in_network(switch_.pid(), "ip link add bridge0 type bridge", watch);
  in_network(switch_.pid(), "ip link set bridge0 up", watch);
  hosts_.reserve(static_cast<std::size_t>(count));
  for (int host = 0; host < count; ++host) {
    hosts_.emplace_back(sleeper(fmt::format("host {}", host)));
    connect(host, rate, watch);
  }
}

std::string VirtualHosts::address(int host) const { return fmt::format("10.77.0.{}", host + 1); }

void VirtualHosts::connect(int host, const std::string& rate, const InterruptWatch& watch) {
  const pid_t here = network(host), there = switch_.pid();
  const std::string port = fmt::format("port{}", host);
  in_network(there, fmt::format("ip link add {} type veth peer name {} netns {}", port, kInterface, here), watch);
  in_network(there, fmt::format("ip link set {} master bridge0 up", port), watch);
  in_network(here, "ip link set lo up", watch);
  in_network(here, fmt::format("ip addr add {}/24 dev {}", address(host), kInterface), watch);
  in_network(here, fmt::format("ip link set {} up", kInterface), watch);
  if (rate.empty()) return;
  in_network(here, shaping(kInterface, rate), watch);
  in_network(there, shaping(port, rate), watch);
}

}  // namespace maniple::bench
