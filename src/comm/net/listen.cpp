#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <set>
#include <sstream>

#include <fmt/format.h>

#include "comm/base/files.h"
#include "comm/base/system_error.h"
#include "comm/net/address.h"

namespace maniple {
namespace {

// A thousand ranks may dial at the same moment. The kernel lowers this to net.core.somaxconn.
constexpr int kBacklog = 4096;

[[noreturn]] void throw_bind_error(const Address& address, int code) {
  std::string text = fmt::format("listen on {}: {}", address.to_string(), errno_text(code));
  if (code == EADDRINUSE && !address.is_unix()) {
    if (const auto holder = describe_port_holder(address.port())) text += fmt::format("; it is held by {}", *holder);
    text += "; choose another port";
  }
  if (code == EADDRNOTAVAIL) text += "; this is not an address of this host";
  throw SystemError(text, code);
}

}  // namespace

UniqueFd listen_on(const Address& address) {
  UniqueFd fd = open_stream_socket(address.family(), fmt::format("listen on {}", address.to_string()));
  const int on = 1;
  if (!address.is_unix()) ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address.family() == AF_INET6) ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
  if (::bind(fd.get(), address.get(), address.length()) != 0) throw_bind_error(address, errno);
  if (::listen(fd.get(), kBacklog) != 0) throw_bind_error(address, errno);
  return fd;
}

namespace {

bool holds_any(const std::string& descriptors, const std::set<std::string>& links) {
  for (const std::string& name : names_in(descriptors)) {
    if (links.count(link_target(descriptors + "/" + name)) != 0) return true;
  }
  return false;
}

}  // namespace

std::vector<std::uint64_t> listening_inodes(std::string_view proc_net_tcp, std::uint16_t port) {
  constexpr std::string_view kListening = "0A";
  const std::string port_suffix = fmt::format(":{:04X}", port);
  std::vector<std::uint64_t> inodes;
  std::istringstream lines{std::string(proc_net_tcp)};
  for (std::string line; std::getline(lines, line);) {
    // sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode
    std::istringstream fields(line);
    std::string slot, local, remote, state, queues, timer, retransmits, uid, timeout;
    std::uint64_t inode = 0;
    if (!(fields >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> uid >> timeout >> inode))
      continue;
    if (state == kListening && local.ends_with(port_suffix)) inodes.push_back(inode);
  }
  return inodes;
}

std::optional<std::string> describe_port_holder(std::uint16_t port) {
  std::set<std::string> links;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    for (const auto inode : listening_inodes(file_text(table), port)) links.insert(fmt::format("socket:[{}]", inode));
  }
  if (links.empty()) return std::nullopt;
  for (const std::string& name : names_in("/proc")) {
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (!holds_any("/proc/" + name + "/fd", links)) continue;
    std::string command = file_text("/proc/" + name + "/comm");
    while (!command.empty() && command.back() == '\n') command.pop_back();
    const bool self = name == std::to_string(::getpid());
    return fmt::format("pid {} ({}){}", name, command, self ? ", which is this process" : "");
  }
  return std::nullopt;
}

}  // namespace maniple
