#include "net/port_holder.h"

#include <unistd.h>

#include <charconv>
#include <set>
#include <sstream>

#include <fmt/format.h>

#include "base/files.h"

namespace maniple {
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
