#include "tools/bench/virtual_network.h"

#include <fcntl.h>
#include <sched.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/system_error.h"

extern char** environ;

namespace maniple::bench {
namespace {

constexpr int kMaxHosts = 1000;

UniqueFd current_namespace() {
  UniqueFd descriptor(::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
  if (!descriptor) throw_system_error("open /proc/thread-self/ns/net");
  return descriptor;
}

/// A separate thread enters the new namespace, so that the caller stays in its own.
UniqueFd make_namespace() {
  UniqueFd made;
  std::exception_ptr failure;
  std::thread([&] {
    try {
      if (::unshare(CLONE_NEWNET) != 0) throw_system_error("unshare of the network");
      made = current_namespace();
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
  return made;
}

/// Starts the command with no signal blocked and both outputs in the pipe.
pid_t start(const std::string& command, int output) {
  std::vector<std::string> words;
  std::istringstream in(command);
  for (std::string word; in >> word;) words.push_back(word);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  for (const int standard : {STDOUT_FILENO, STDERR_FILENO})
    posix_spawn_file_actions_adddup2(&actions, output, standard);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  pid_t pid = -1;
  const int error = ::posix_spawnp(&pid, argv[0], &actions, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw_system_error("start " + command, error);
  return pid;
}

void run_in(int network, const std::string& command) {
  std::array<int, 2> ends;
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw_system_error("pipe2");
  const UniqueFd reading(ends[0]);
  UniqueFd writing(ends[1]);
  pid_t pid = -1;
  {
    const InsideNamespace inside(network);
    pid = start(command, writing.get());
  }
  writing.reset();
  std::string printed;
  std::array<char, 512> bytes;
  for (ssize_t got; (got = ::read(reading.get(), bytes.data(), bytes.size())) > 0 || (got < 0 && errno == EINTR);) {
    if (got > 0) printed.append(bytes.data(), static_cast<std::size_t>(got));
  }
  int status = -1;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (status != 0) throw Error(ErrorKind::system, fmt::format("`{}` failed: {}", command, printed));
}

/// Shapes one end of a link. The bucket holds several of the network stack's largest segments (64 KiB), but far less
/// than the measured transfers.
std::string shaping(const std::string& device, const std::string& rate, double queue_ms) {
  return fmt::format("tc qdisc add dev {} root tbf rate {} burst 256kb latency {:.0f}ms", device, rate, queue_ms);
}

}  // namespace

std::string VirtualNetwork::why_not() {
  if (::geteuid() != 0) return "needs root";
  static const std::string kReason = [] {
    try {
      const VirtualNetwork probe(1);
      return std::string();
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
  }();
  return kReason;
}

std::string VirtualNetwork::address(int host) { return fmt::format("10.77.{}.{}", host / 250, host % 250 + 1); }

std::string VirtualNetwork::path(int host) const { return fmt::format("/proc/{}/fd/{}", ::getpid(), descriptor(host)); }

VirtualNetwork::VirtualNetwork(int hosts, const std::string& rate, double queue_ms) {
  MANIPLE_REQUIRE(hosts >= 1 && hosts <= kMaxHosts, "{} virtual hosts; expected 1 to {}", hosts, kMaxHosts);
  bridge_ = make_namespace();
  run_in(bridge_.get(), "ip link add bridge type bridge forward_delay 0 stp_state 0");
  run_in(bridge_.get(), "ip link set bridge up");
  for (int host = 0; host < hosts; ++host) {
    hosts_.push_back(make_namespace());
    const std::string port = fmt::format("port{}", host);
    run_in(bridge_.get(), fmt::format("ip link add {} type veth peer name {} netns {}", port, kInterface, path(host)));
    run_in(bridge_.get(), fmt::format("ip link set {} master bridge up", port));
    run_on(host, fmt::format("ip addr add {}/16 dev {}", address(host), kInterface));
    run_on(host, fmt::format("ip link set {} up", kInterface));
    run_on(host, "ip link set lo up");
    if (rate.empty()) continue;
    run_on(host, shaping(kInterface, rate, queue_ms));
    run_in(bridge_.get(), shaping(port, rate, queue_ms));
  }
}

void VirtualNetwork::set_link(int host, const std::string& state) {
  run_in(bridge_.get(), fmt::format("ip link set port{} {}", host, state));
}

void VirtualNetwork::run_on(int host, const std::string& command) const { run_in(descriptor(host), command); }

void VirtualNetwork::write_remote_shell(const std::string& path) const {
  std::ofstream script(path);
  script << "#!/bin/sh\nwhile [ \"${1#-}\" != \"$1\" ]; do shift; done\ncase \"$1\" in\n";
  for (int host = 0; host < hosts(); ++host)
    script << fmt::format("  {}) network={} ;;\n", address(host), this->path(host));
  script << "  *) echo \"no such host: $1\" >&2; exit 1 ;;\nesac\nshift\nexec nsenter --net=\"$network\" /bin/sh -c "
            "\"$*\"\n";
  script.close();
  if (!script || ::chmod(path.c_str(), 0700) != 0) throw_system_error("write " + path);
}

InsideNamespace::InsideNamespace(int descriptor) : home_(current_namespace()) {
  if (::setns(descriptor, CLONE_NEWNET) != 0) throw_system_error("enter a network namespace");
}

InsideNamespace::~InsideNamespace() {
  if (::setns(home_.get(), CLONE_NEWNET) != 0) {
    std::fprintf(stderr, "cannot leave a network namespace\n");
    std::abort();
  }
}

}  // namespace maniple::bench
