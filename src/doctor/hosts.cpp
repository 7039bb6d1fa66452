#include "doctor/hosts.h"

#include <ifaddrs.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <chrono>
#include <cstdio>

#include <fmt/format.h>

#include "base/check.h"
#include "base/system_error.h"
#include "doctor/problem_in.h"
#include "doctor/remote_command.h"
#include "doctor/system_files.h"
#include "net/address.h"

namespace maniple::doctor {
namespace {

constexpr auto kStartPatience = std::chrono::seconds(20);  // for the remote shell to log in
constexpr auto kPatience = std::chrono::seconds(10);       // for a connection

// For a shell: the remote one puts its words together and takes them apart again.
std::string quoted(const std::string& word) {
  std::string result = "'";
  for (const char c : word) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

std::string random_word() {
  unsigned char bytes[16];
  if (::getrandom(bytes, sizeof bytes, 0) != sizeof bytes) throw_system_error("getrandom");
  std::string word;
  for (const unsigned char byte : bytes) word += fmt::format("{:02x}", byte);
  return word;
}

void send_word(const Address& to, const std::string& word) {
  const UniqueFd line = connect_to(to, Deadline::after(kPatience));
  const std::string text = word + "\n";
  if (::send(line.get(), text.data(), text.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(text.size()))
    throw_system_error("send to " + to.to_string());
}

// Waits for a caller who says the word; strangers are sent away.
void expect_word(int listener, const std::string& word, Deadline deadline) {
  for (;;) {
    pollfd state{listener, POLLIN, 0};
    if (::poll(&state, 1, deadline.poll_ms()) <= 0 && deadline.expired()) throw Timeout("nobody called");
    const UniqueFd line(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (!line) continue;
    std::string heard;
    const Deadline context = Deadline::sooner(deadline, Deadline::after(std::chrono::seconds(5)));
    while (heard.size() <= word.size() && !context.expired()) {
      pollfd talk{line.get(), POLLIN, 0};
      if (::poll(&talk, 1, context.poll_ms()) <= 0) continue;
      char bytes[64];
      const ssize_t got = ::read(line.get(), bytes, sizeof bytes);
      if (got <= 0) break;
      heard.append(bytes, static_cast<std::size_t>(got));
    }
    if (heard == word + "\n") return;
  }
}

std::string interface_with(const std::string& address) {
  ifaddrs* list = nullptr;
  std::string name;
  if (::getifaddrs(&list) != 0) return name;
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr) continue;
    const int family = each->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (Address::from_raw(each->ifa_addr, length).host() == address) name = each->ifa_name;
  }
  ::freeifaddrs(list);
  return name;
}

// The conversation with the other side, once it runs.
void talk(RemoteCommand& other, const Address& there, int listener, const std::string& word, HostFacts& facts) {
  const auto first = other.next_line(Deadline::after(kStartPatience));
  const auto words = split(first.value_or(""), ' ');
  int port = 0;
  if (words.size() == 3) std::from_chars(words[2].data(), words[2].data() + words[2].size(), port);
  if (words.size() != 3 || words[0] != "listening" || port < 1 || port > 65535) {
    const std::string complaint = other.complaint();
    facts.shell_problem = !complaint.empty()  ? complaint
                          : first             ? fmt::format("it answered \"{}\"", *first)
                          : other.has_ended() ? std::string("it ended without an answer")
                                              : fmt::format("no answer in {} s", kStartPatience.count());
    return;
  }
  facts.version = words[1];
  facts.there_problem = problem_in([&] { send_word(there.with_port(static_cast<std::uint16_t>(port)), word); });
  facts.back_problem = problem_in([&] { expect_word(listener, word, Deadline::after(kPatience)); });
  for (auto line = other.next_line(Deadline::after(kPatience)); line;
       line = other.next_line(Deadline::after(kPatience))) {
    if (line->starts_with("cannot-call-back ")) facts.back_problem = line->substr(line->find(' ') + 1);
    if (line->starts_with("heard-nothing ") && facts.there_problem.empty())
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
    return {{Verdict::fail, fmt::format("{} ({}): no route leads there", host, facts.address), "look at: ip route"}};
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
  if (findings.empty()) findings.push_back({Verdict::ok, way + ": reached, and reaches us"});
  return findings;
}

HostFacts look_at_host(const std::string& host, const HostOptions& options) {
  HostFacts facts{.host = host};
  std::vector<Address> addresses;
  facts.resolve_problem = problem_in([&] { addresses = Address::resolve(host, 0, Deadline::after(kPatience)); });
  if (!facts.resolve_problem.empty()) return facts;
  const Address there = addresses.front();
  facts.address = there.host();
  Address here;
  if (!problem_in([&] { here = route_to(there.with_port(9)); }).empty()) return facts;
  facts.own_address = here.host();
  facts.interface_name = interface_with(facts.own_address);

  const std::string not_started = problem_in([&] {
    const UniqueFd listener = listen_on(here.with_port(0));
    const std::string word = random_word();
    const std::string program = options.program.empty() ? real_path("/proc/self/exe") : options.program;
    std::vector<std::string> words = split(options.remote_shell, ' ');
    MANIPLE_REQUIRE(!words.empty(), "the remote shell is empty");
    words.push_back(host);
    for (const std::string& part :
         {program, std::string("doctor"), std::string("--answer"), facts.address, std::string("--call-back"),
          Address::of_socket(listener.get()).to_string(), std::string("--word"), word}) {
      words.push_back(quoted(part));
    }
    RemoteCommand other(words);
    talk(other, there, listener.get(), word, facts);
  });
  if (!not_started.empty()) facts.shell_problem = not_started;
  return facts;
}

int answer_doctor(const std::string& own_address, const std::string& call_back, const std::string& word,
                  const std::string& version) {
  const auto say = [](const std::string& line) {
    std::fputs((line + "\n").c_str(), stdout);
    std::fflush(stdout);
  };
  const auto own = Address::resolve(own_address, 0, Deadline::after(kPatience));
  const UniqueFd listener = listen_on(own.front().with_port(0));
  say(fmt::format("listening {} {}", version, Address::of_socket(listener.get()).port()));
  const std::string back = problem_in([&] { send_word(Address::parse(call_back), word); });
  say(back.empty() ? "called-back" : "cannot-call-back " + back);
  const std::string heard = problem_in([&] { expect_word(listener.get(), word, Deadline::after(kPatience)); });
  say(heard.empty() ? "heard" : "heard-nothing " + heard);
  return back.empty() && heard.empty() ? 0 : 1;
}

std::vector<std::string> parse_hosts(std::string_view text) {
  std::vector<std::string> hosts;
  for (std::string host : split(text, ',')) {
    if (const auto close = host.find(']'); host.starts_with('[') && close != std::string::npos) host = host.substr(1, close - 1);
    const auto colon = host.find(':');
    if (colon != std::string::npos && host.find(':', colon + 1) == std::string::npos) host.resize(colon);
    const bool plain =
        !host.empty() && host.front() != '-' && std::all_of(host.begin(), host.end(), [](unsigned char c) {
          return std::isalnum(c) != 0 || c == '.' || c == '-' || c == '_' || c == ':' || c == '@';
        });
    MANIPLE_REQUIRE(plain, "\"{}\" is no name of a host", host);
    hosts.push_back(std::move(host));
  }
  MANIPLE_REQUIRE(!hosts.empty(), "--hosts names no host");
  return hosts;
}

}  // namespace maniple::doctor
