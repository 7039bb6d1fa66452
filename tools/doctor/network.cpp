#include "tools/doctor/checks.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "comm/base/crypto.h"
#include "comm/base/environment.h"
#include "comm/net/address.h"

namespace maniple::doctor {
namespace {

constexpr auto kNetworkTimeout = std::chrono::seconds(5);

bool is_loopback_text(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

void judge_interfaces(const NetworkFacts& facts, Findings& findings) {
  std::vector<std::string> usable;
  for (const Interface& each : facts.interfaces) {
    if (each.up && !each.loopback && !each.address.starts_with("fe80"))
      usable.push_back(each.name + " " + each.address);
  }
  if (usable.empty()) {
    findings.push_back({Verdict::warn,
                        "only the loopback interface is up: jobs work on this machine, but not across machines",
                        "bring one up: ip link set DEVICE up; in a container, run it with a network"});
    return;
  }
  findings.push_back({Verdict::ok, fmt::format("interfaces: {}", fmt::join(usable, ", "))});
  if (!facts.chosen.empty() && facts.chosen_problem.empty()) {
    findings.push_back({Verdict::ok, fmt::format("data uses {} (MANIPLE_INTERFACE)", facts.chosen)});
  } else if (facts.chosen.empty() && facts.route.empty()) {
    findings.push_back({Verdict::warn, "no route to other networks: data uses the interface that leads to the master",
                        "if the master cannot be reached: set MANIPLE_INTERFACE to one of the interfaces"});
  } else if (facts.chosen.empty()) {
    findings.push_back(
        {Verdict::ok, fmt::format("data uses the route to the master; the default route uses {}", facts.route)});
  }
}

void judge_hostname(const NetworkFacts& facts, Findings& findings) {
  if (facts.hostname_addresses.empty()) {
    findings.push_back({Verdict::warn, fmt::format("the name of this machine, {}, has no address", facts.hostname),
                        "add it to /etc/hosts, or give MASTER_ADDR as a number"});
    return;
  }
  const auto addresses = fmt::format("{}", fmt::join(facts.hostname_addresses, ", "));
  if (std::all_of(facts.hostname_addresses.begin(), facts.hostname_addresses.end(), is_loopback_text)) {
    findings.push_back({Verdict::warn,
                        fmt::format("the name of this machine, {}, means {} here: others cannot reach that",
                                    facts.hostname, addresses),
                        "for jobs on several machines give MASTER_ADDR as a number, or fix /etc/hosts"});
    return;
  }
  findings.push_back({Verdict::ok, fmt::format("{} is {}", facts.hostname, addresses)});
}

}  // namespace

std::vector<Interface> list_interfaces() {
  std::vector<Interface> interfaces;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return interfaces;
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr) continue;
    const int family = each->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    interfaces.push_back({.name = each->ifa_name,
                          .address = Address::from_raw(each->ifa_addr, length).host(),
                          .up = (each->ifa_flags & IFF_UP) != 0 && (each->ifa_flags & IFF_RUNNING) != 0,
                          .loopback = (each->ifa_flags & IFF_LOOPBACK) != 0});
  }
  ::freeifaddrs(list);
  return interfaces;
}

Findings judge(const NetworkFacts& facts) {
  Findings findings;
  judge_interfaces(facts, findings);
  if (!facts.chosen_problem.empty()) {
    findings.push_back({Verdict::fail,
                        fmt::format("MANIPLE_INTERFACE is \"{}\": {}", facts.chosen, facts.chosen_problem),
                        "set it to an existing interface, or unset it"});
  }
  judge_hostname(facts, findings);
  if (facts.loopback_problem.empty()) {
    findings.push_back({Verdict::ok, "loopback works"});
  } else {
    findings.push_back({Verdict::fail, "loopback does not work: " + facts.loopback_problem, "ip link set lo up"});
  }
  if (facts.port_problem.empty()) {
    findings.push_back({Verdict::ok, "ranks can listen on a free port"});
  } else {
    findings.push_back({Verdict::fail, "ranks cannot listen on any port: " + facts.port_problem,
                        "look for a sandbox or a policy that forbids bind() and listen()"});
  }
  if (!facts.openssl_problem.empty())
    findings.push_back({Verdict::fail, facts.openssl_problem, "apt-get install libssl3"});
  return findings;
}

NetworkFacts inspect_network() {
  NetworkFacts facts;
  facts.interfaces = list_interfaces();
  if (const auto chosen = environment_text("MANIPLE_INTERFACE")) {
    facts.chosen = *chosen;
    facts.chosen_problem = problem_in([&] { Address::of_interface(*chosen); });
  }
  // Only queries the kernel's routing table; no packet is sent.
  problem_in([&] { facts.route = route_to(Address::parse("192.0.2.1:9")).host(); });
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  facts.hostname = name;
  problem_in([&] {
    for (const Address& address : Address::resolve(name, 0, Deadline::after(kNetworkTimeout))) {
      if (std::find(facts.hostname_addresses.begin(), facts.hostname_addresses.end(), address.host()) ==
          facts.hostname_addresses.end()) {
        facts.hostname_addresses.push_back(address.host());
      }
    }
  });
  facts.openssl_problem = problem_in([] { crypto_function("HMAC"); });
  UniqueFd listener;
  facts.port_problem = problem_in([&] { listener = listen_on(Address::parse("127.0.0.1:0")); });
  if (facts.port_problem.empty()) {
    facts.loopback_problem =
        problem_in([&] { connect_to(Address::of_socket(listener.get()), Deadline::after(kNetworkTimeout)); });
  }
  return facts;
}

}  // namespace maniple::doctor
