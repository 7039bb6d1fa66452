#include "harness/network.h"

#include <fcntl.h>
#include <sched.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <system_error>

#include <fmt/format.h>

#include "base/files.h"

extern char** environ;

namespace maniple::harness {
namespace {

constexpr const char* kPrefix = "mntest";
constexpr const char* kNamespaceFolder = "/run/netns";

// Runs `ip` or `tc` with words separated by blanks; false (or an exception) when it fails.
bool run_tool(const std::string& command, bool must_succeed = true) {
  std::vector<std::string> words;
  std::istringstream in(command);
  for (std::string word; in >> word;) words.push_back(word);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  if (!must_succeed) posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t pid = 0;
  const int error = ::posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  int status = -1;
  if (error == 0) {
    while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
  }
  if (status == 0) return true;
  if (must_succeed) throw std::runtime_error(fmt::format("\"{}\" failed with status {}", command, status));
  return false;
}

// Namespaces whose program did not live to remove them.
void remove_stale() {
  for (const std::string& name : names_in(kNamespaceFolder)) {
    if (!name.starts_with(kPrefix)) continue;
    const pid_t owner = std::atoi(name.c_str() + std::string_view(kPrefix).size());
    if (owner > 0 && ::kill(owner, 0) != 0 && errno == ESRCH) run_tool("ip netns del " + name, false);
  }
}

}  // namespace

std::string Network::why_not() {
  if (::geteuid() != 0) return "needs root";
  static const std::string kReason = [] {
    const std::string name = fmt::format("{}{}probe", kPrefix, ::getpid());
    try {
      if (!run_tool("ip netns add " + name, false)) return std::string("`ip netns add` does not work here");
      const bool veth = run_tool(fmt::format("ip -n {} link add probe0 type veth peer name probe1", name), false) &&
                        run_tool(fmt::format("ip -n {} link add probe2 type bridge", name), false);
      run_tool("ip netns del " + name, false);
      return std::string(veth ? "" : "the kernel makes no veth pair or no bridge");
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
  }();
  return kReason;
}

std::string Network::address(int host) { return fmt::format("10.77.{}.{}", host / 250, host % 250 + 1); }

Network::Network(int hosts, double rate_mbit, double queue_ms) {
  static std::atomic<int> counter{0};
  const std::string stem = fmt::format("{}{}x{}", kPrefix, ::getpid(), counter++);
  remove_stale();
  bridge_ = stem + "bridge";
  run_tool("ip netns add " + bridge_);
  try {
    run_tool(fmt::format("ip -n {} link add bridge type bridge forward_delay 0 stp_state 0", bridge_));
    run_tool(fmt::format("ip -n {} link set bridge up", bridge_));
    for (int host = 0; host < hosts; ++host) {
      names_.push_back(fmt::format("{}h{}", stem, host));
      const std::string& name = names_.back();
      run_tool("ip netns add " + name);
      run_tool(fmt::format("ip -n {} link add port{} type veth peer name eth0 netns {}", bridge_, host, name));
      run_tool(fmt::format("ip -n {} link set port{} master bridge up", bridge_, host));
      run_tool(fmt::format("ip -n {} addr add {}/16 dev eth0", name, address(host)));
      run_tool(fmt::format("ip -n {} link set eth0 up", name));
      run_tool(fmt::format("ip -n {} link set lo up", name));
      if (rate_mbit > 0) {
        // Both directions: what the host sends, and what the bridge sends to it.
        const std::string shape = fmt::format("root tbf rate {:.0f}kbit burst 256kb latency {:.0f}ms", rate_mbit * 1000, queue_ms);
        run_tool(fmt::format("tc -n {} qdisc add dev eth0 {}", name, shape));
        run_tool(fmt::format("tc -n {} qdisc add dev port{} {}", bridge_, host, shape));
      }
    }
  } catch (...) {
    remove();
    throw;
  }
}

Network::~Network() { remove(); }

void Network::remove() noexcept {
  for (const std::string& name : names_) run_tool("ip netns del " + name, false);
  run_tool("ip netns del " + bridge_, false);
}

void Network::set_link(int host, const std::string& state) {
  run_tool(fmt::format("ip -n {} link set port{} {}", bridge_, host, state));
}

long long Network::sent_bytes(int host) const {
  const InsideNamespace inside(name_of(host));
  // /proc/thread-self/net shows the namespace of this thread.
  std::ifstream in("/proc/thread-self/net/dev");
  for (std::string line; std::getline(in, line);) {
    long long received = 0, sent = 0, skip = 0;
    const std::size_t colon = line.find("eth0:");
    if (colon == std::string::npos) continue;
    std::istringstream numbers(line.substr(colon + 5));
    numbers >> received;
    for (int i = 0; i < 7; ++i) numbers >> skip;
    numbers >> sent;
    return sent;
  }
  return -1;
}

InsideNamespace::InsideNamespace(const std::string& name) {
  home_ = UniqueFd(::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
  const UniqueFd there(::open(fmt::format("{}/{}", kNamespaceFolder, name).c_str(), O_RDONLY | O_CLOEXEC));
  if (!home_ || !there || ::setns(there.get(), CLONE_NEWNET) != 0) {
    throw std::system_error(errno, std::generic_category(), "entering network namespace " + name);
  }
}

InsideNamespace::~InsideNamespace() {
  if (::setns(home_.get(), CLONE_NEWNET) != 0) {
    std::fprintf(stderr, "cannot leave a network namespace\n");
    std::abort();
  }
}

}  // namespace maniple::harness
