#include "launch/coordinate/remote_start.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdlib>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/system_error.h"
#include "comm/base/write_all.h"
#include "comm/rendezvous/secret_source.h"
#include "launch/coordinate/job_settings.h"
#include "launch/process/descriptors.h"
#include "launch/process/failure_report.h"
#include "launch/process/start.h"

namespace maniple::launch {
namespace {

constexpr std::chrono::seconds kResolve{10};
constexpr std::chrono::seconds kAgain{2};  // pause before an agent is restarted

std::string own_program() {
  char path[PATH_MAX];
  const ssize_t length = ::readlink("/proc/self/exe", path, sizeof path);
  if (length <= 0) throw_system_error("/proc/self/exe");
  return {path, static_cast<std::size_t>(length)};
}

}  // namespace

std::string quoted(const std::string& word) {
  std::string result = "'";
  for (const char c : word) {
    if (c == '\'') {
      result += "'\\''";
    } else {
      result += c;
    }
  }
  return result + "'";
}

std::vector<std::string> split_words(const std::string& text) {
  std::vector<std::string> words;
  for (std::size_t begin = text.find_first_not_of(' '); begin != std::string::npos;) {
    const auto end = std::min(text.find(' ', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = text.find_first_not_of(' ', end);
  }
  return words;
}

bool is_this_host(const std::string& host) {
  return host == "localhost" || host == "127.0.0.1" || host == "::1" || host == own_host_name();
}

Address address_towards(const std::vector<HostSlots>& hosts, int cancel) {
  const std::string interface_name = knob_text(Knob::interface_name);
  if (!interface_name.empty()) return Address::of_interface(interface_name).with_port(0);
  for (const HostSlots& host : hosts) {
    if (is_this_host(host.host)) continue;
    // ssh may know a name from its own configuration that the resolver does not know; then another host may do.
    const auto at = host.host.find('@');
    const std::string name = at == std::string::npos ? host.host : host.host.substr(at + 1);
    try {
      const auto addresses = Address::resolve(name, 1, Deadline::after(kResolve), cancel);
      return route_to(addresses.front()).with_port(0);
    } catch (const Aborted&) {
      throw;
    } catch (const Error& error) {
      throw InvalidArgument(fmt::format("--hosts: host {}: {}", host.host, error.what()));
    }
  }
  return Address::parse("127.0.0.1:0");
}

RemoteStart::RemoteStart(Poller& poller, Console& console, const LaunchOptions& options, const Address& coordinator,
                         const Secret& secret, std::function<void(int, const std::string&)> failed)
    : poller_(poller),
      console_(console),
      options_(options),
      coordinator_(coordinator),
      secret_(secret),
      failed_(std::move(failed)),
      hosts_(options.hosts.size()) {
  make_room_for_pipes(static_cast<int>(options.hosts.size()));
  for (std::size_t host = 0; host < options.hosts.size(); ++host) start(host);
}

RemoteStart::~RemoteStart() {
  for (const auto& shell : shells_) {
    if (shell->pid > 0) ::kill(-shell->pid, SIGKILL);
    for (Output* output : {&shell->out, &shell->err}) {
      if (output->fd) poller_.remove(output->fd.get());
    }
  }
}

void RemoteStart::start(std::size_t host) {
  const LaunchOptions& options = options_;
  const std::string& name = options.hosts[host].host;
  const bool here = is_this_host(name);
  const std::string remote = here || options.remote_maniple.empty() ? own_program() : options.remote_maniple;
  std::vector<std::string> agent = {remote, "run-agent", coordinator_.to_string(), std::to_string(host)};
  if (options.share_gpu && given_mps_folder(options).empty()) agent.push_back("--share-gpu");
  std::vector<std::string> command = agent;
  if (!here) {
    command = split_words(options.rsh);
    MANIPLE_REQUIRE(!command.empty(), "--rsh is empty; expected a command like ssh");
    command.push_back(name);
    std::string line = "exec";
    for (const std::string& word : agent) line += fmt::format(" {}", quoted(word));
    command.push_back(line);
  }
  const char* path = std::getenv("PATH");
  const Program program = find_program(command, path != nullptr ? path : "/usr/bin:/bin");
  const Environment environment = own_environment();

  auto [read_end, write_end] = make_pipe();
  auto shell = std::make_unique<Shell>();
  shell->input = std::move(write_end);
  const std::string line = hex_of(secret_) + "\n";
  if (write_all(shell->input.get(), line) != line.size()) throw_system_error("passing the secret on");
  StartedProcess started = start_process({.program = &program, .environment = &environment, .input = read_end.get()});
  shell->host = host;
  shell->pid = started.pid;
  hosts_[host].starting = true;
  Shell& placed = *shells_.emplace_back(std::move(shell));
  const auto attach = [&](Output& output, UniqueFd fd, bool to_err) {
    output.fd = std::move(fd);
    output.pump = std::make_unique<LogPump>(console_, LogPump::Route{.to_err = to_err, .shown = true, .prefix = {}},
                                            std::make_shared<OutputTail>(), nullptr);
    watch(output);
  };
  attach(placed.out, std::move(started.out), false);
  attach(placed.err, std::move(started.err), true);
}

void RemoteStart::watch(Output& output) {
  if (output.fd) poller_.add(output.fd.get(), EPOLLIN, [this, &output](std::uint32_t) { read_from(output); });
}

void RemoteStart::read_from(Output& output) {
  if (output.pump->congested()) {  // the rest waits in the pipe, in ssh and in the agent
    // Stop watching: a pipe whose writer is gone would be reported again and again.
    poller_.remove(output.fd.get());
    poller_.call_after(std::chrono::duration<double>(0.02), [this, &output] { watch(output); });
    return;
  }
  char buffer[65536];
  const ssize_t got = ::read(output.fd.get(), buffer, sizeof buffer);
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (got > 0) return output.pump->take(std::string_view(buffer, static_cast<std::size_t>(got)));
  output.pump->finish();
  poller_.remove(output.fd.get());
  output.fd.reset();
}

bool RemoteStart::joined(int host) {
  if (host < 0 || static_cast<std::size_t>(host) >= hosts_.size()) return false;
  Host& entry = hosts_[static_cast<std::size_t>(host)];
  entry.starting = entry.warned = false;
  return !std::exchange(entry.joined, true);
}

void RemoteStart::lost(int host) { hosts_[static_cast<std::size_t>(host)].joined = false; }

void RemoteStart::start_missing(std::function<bool()> keep_trying) {
  keep_trying_ = std::move(keep_trying);
  for (std::size_t host = 0; host < hosts_.size(); ++host) start_again(host);
}

void RemoteStart::start_again(std::size_t host) {
  Host& entry = hosts_[host];
  if (entry.joined || entry.starting || !keep_trying_()) return;
  try {
    start(host);
    if (!entry.warned)
      console_.say(fmt::format("maniple: host {}: its agent is started again", options_.hosts[host].host));
  } catch (const Error& error) {
    console_.say(fmt::format("maniple: host {}: {}", options_.hosts[host].host, error.what()));
    poller_.call_after(kAgain, [this, host] { start_again(host); });
  }
}

bool RemoteStart::child_ended(pid_t pid, int code, int status) {
  for (const auto& each : shells_) {
    Shell& shell = *each;
    if (shell.pid != pid) continue;
    shell.pid = -1;
    Host& host = hosts_[shell.host];
    if (host.joined || !host.starting) return true;
    host.starting = false;
    while (shell.err.fd) {
      char buffer[4096];
      const ssize_t got = ::read(shell.err.fd.get(), buffer, sizeof buffer);
      if (got <= 0) break;
      shell.err.pump->take(std::string_view(buffer, static_cast<std::size_t>(got)));
    }
    RankExit exit;
    (code == CLD_EXITED ? exit.code : exit.signal) = status;
    const std::string why =
        fmt::format("its agent could not be started: the remote shell ended with {}", describe_end(exit));
    if (!keep_trying_) {
      failed_(static_cast<int>(shell.host), why);
    } else {
      if (!std::exchange(host.warned, true)) {
        console_.say(fmt::format("maniple: host {}: {}; trying again", options_.hosts[shell.host].host, why));
      }
      poller_.call_after(kAgain, [this, number = shell.host] { start_again(number); });
    }
    return true;
  }
  return false;
}

bool RemoteStart::gone() const noexcept {
  for (const auto& shell : shells_) {
    if (shell->pid > 0 || shell->out.fd || shell->err.fd) return false;
  }
  return true;
}

}  // namespace maniple::launch
