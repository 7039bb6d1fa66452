#include "tools/doctor/hosts.h"

#include <poll.h>
#include <sys/random.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdio>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/system_error.h"
#include "comm/base/write_all.h"
#include "comm/net/address.h"
#include "launch/coordinate/remote_start.h"
#include "launch/process/start.h"
#include "tools/doctor/checks.h"

namespace maniple::doctor {
namespace {

constexpr auto kStartTimeout = std::chrono::seconds(20);  // for the remote shell to log in
constexpr auto kTimeout = std::chrono::seconds(10);       // for a connection

std::string random_token() {
  unsigned char bytes[16];
  if (::getrandom(bytes, sizeof bytes, 0) != sizeof bytes) throw_system_error("getrandom");
  std::string token;
  for (const unsigned char byte : bytes) token += fmt::format("{:02x}", byte);
  return token;
}

void send_token(const Address& to, const std::string& token) {
  const UniqueFd line = connect_to(to, Deadline::after(kTimeout));
  const std::string text = token + "\n";
  if (send_all(line.get(), text) != text.size()) throw_system_error("send to " + to.to_string());
}

// Waits for a connection that sends the token; others are closed.
void expect_token(int listener, const std::string& token, Deadline deadline) {
  for (;;) {
    pollfd state{listener, POLLIN, 0};
    if (::poll(&state, 1, deadline.poll_ms()) <= 0 && deadline.expired()) throw Timeout("nobody connected");
    const UniqueFd line(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (!line) continue;
    std::string received;
    const Deadline limit = Deadline::sooner(deadline, Deadline::after(std::chrono::seconds(5)));
    while (received.size() <= token.size() && !limit.expired()) {
      pollfd input{line.get(), POLLIN, 0};
      if (::poll(&input, 1, limit.poll_ms()) <= 0) continue;
      char bytes[64];
      const ssize_t got = ::read(line.get(), bytes, sizeof bytes);
      if (got <= 0) break;
      received.append(bytes, static_cast<std::size_t>(got));
    }
    if (received == token + "\n") return;
  }
}

std::string interface_with(const std::string& address) {
  for (const Interface& each : list_interfaces()) {
    if (each.address == address) return each.name;
  }
  return "";
}

// The exchange with the remote side once it runs.
void run_check(launch::ChildProcess& other, const Address& there, int listener, const std::string& token,
               HostFacts& facts) {
  const auto first = other.next_line(Deadline::after(kStartTimeout));
  const auto fields = split(first.value_or(""), ' ');
  int port = 0;
  if (fields.size() == 3) std::from_chars(fields[2].data(), fields[2].data() + fields[2].size(), port);
  if (fields.size() != 3 || fields[0] != "listening" || port < 1 || port > 65535) {
    const std::string complaint = other.last_error_line();
    facts.shell_problem = !complaint.empty()  ? complaint
                          : first             ? fmt::format("it answered \"{}\"", *first)
                          : other.has_ended() ? std::string("it ended without a reply")
                                              : fmt::format("no answer in {} s", kStartTimeout.count());
    return;
  }
  facts.version = fields[1];
  facts.there_problem = problem_in([&] { send_token(there.with_port(static_cast<std::uint16_t>(port)), token); });
  facts.back_problem = problem_in([&] { expect_token(listener, token, Deadline::after(kTimeout)); });
  for (auto line = other.next_line(Deadline::after(kTimeout)); line;
       line = other.next_line(Deadline::after(kTimeout))) {
    if (line->starts_with("cannot-connect-back ")) facts.back_problem = line->substr(line->find(' ') + 1);
    if (line->starts_with("received-nothing ") && facts.there_problem.empty())
      facts.there_problem = line->substr(line->find(' ') + 1);
  }
}

}  // namespace

Findings judge(const HostFacts& facts, const std::string& own_version) {
  const std::string& host = facts.host;
  if (!facts.resolve_problem.empty()) {
    return {{Verdict::fail, fmt::format("{}: {}", host, facts.resolve_problem),
             "add it to /etc/hosts or DNS, or give its number"}};
  }
  if (facts.own_address.empty()) {
    return {{Verdict::fail, fmt::format("{} ({}): no route leads there", host, facts.address), "check: ip route"}};
  }
  if (!facts.shell_problem.empty()) {
    return {{Verdict::fail,
             fmt::format("{} ({}): maniple cannot be started there: {}", host, facts.address, facts.shell_problem),
             "ssh to it must work without a password (ssh-copy-id), and maniple be installed at the same path (or "
             "--remote-program)"}};
  }
  Findings findings;
  const std::string way = fmt::format("{} ({}) from {}{}", host, facts.address, facts.own_address,
                                      facts.interface_name.empty() ? "" : " on " + facts.interface_name);
  if (!facts.there_problem.empty()) {
    findings.push_back({Verdict::fail, fmt::format("{}: it cannot be reached: {}", way, facts.there_problem),
                        "look for a firewall there: ranks need TCP ports of the ephemeral range"});
  }
  if (!facts.back_problem.empty()) {
    findings.push_back({Verdict::fail, fmt::format("{}: it cannot reach this machine: {}", way, facts.back_problem),
                        "look for a firewall here; with several networks set MANIPLE_INTERFACE"});
  }
  if (facts.version != own_version) {
    findings.push_back({Verdict::fail,
                        fmt::format("{}: it has maniple {}, this machine {}", host, facts.version, own_version),
                        "install the same version on all machines"});
  }
  if (findings.empty()) findings.push_back({Verdict::ok, way + ": reached, and reaches this machine"});
  return findings;
}

HostFacts inspect_host(const std::string& host, const HostOptions& options) {
  HostFacts facts{.host = host};
  std::vector<Address> addresses;
  facts.resolve_problem = problem_in([&] { addresses = Address::resolve(host, 0, Deadline::after(kTimeout)); });
  if (!facts.resolve_problem.empty()) return facts;
  const Address there = addresses.front();
  facts.address = there.host();
  Address here;
  if (!problem_in([&] { here = route_to(there.with_port(9)); }).empty()) return facts;
  facts.own_address = here.host();
  facts.interface_name = interface_with(facts.own_address);

  const std::string not_started = problem_in([&] {
    const UniqueFd listener = listen_on(here.with_port(0));
    const std::string token = random_token();
    const std::string program = options.program.empty() ? real_path("/proc/self/exe") : options.program;
    std::vector<std::string> command = launch::split_words(options.remote_shell);
    MANIPLE_REQUIRE(!command.empty(), "the remote shell is empty");
    command.push_back(host);
    for (const std::string& part :
         {program, std::string("doctor"), std::string("--answer"), facts.address, std::string("--connect-back"),
          Address::of_socket(listener.get()).to_string(), std::string("--token"), token}) {
      command.push_back(launch::quoted(part));
    }
    launch::ChildProcess other(command);
    run_check(other, there, listener.get(), token, facts);
  });
  if (!not_started.empty()) facts.shell_problem = not_started;
  return facts;
}

int answer_doctor(const std::string& own_address, const std::string& connect_back, const std::string& token,
                  const std::string& version) {
  const auto say = [](const std::string& line) {
    std::fputs((line + "\n").c_str(), stdout);
    std::fflush(stdout);
  };
  const auto own = Address::resolve(own_address, 0, Deadline::after(kTimeout));
  const UniqueFd listener = listen_on(own.front().with_port(0));
  say(fmt::format("listening {} {}", version, Address::of_socket(listener.get()).port()));
  const std::string back = problem_in([&] { send_token(Address::parse(connect_back), token); });
  say(back.empty() ? "connected-back" : "cannot-connect-back " + back);
  const std::string received = problem_in([&] { expect_token(listener.get(), token, Deadline::after(kTimeout)); });
  say(received.empty() ? "received" : "received-nothing " + received);
  return back.empty() && received.empty() ? 0 : 1;
}

}  // namespace maniple::doctor
