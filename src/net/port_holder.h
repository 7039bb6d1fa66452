// Who listens on a port: for the message that it is taken.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace maniple {

/// Inodes of the sockets that listen on `port`, from the text of /proc/net/tcp or tcp6.
std::vector<std::uint64_t> listening_inodes(std::string_view proc_net_tcp, std::uint16_t port);

/// The process that listens on the port, when this user may see it: "pid 4711 (python3)".
std::optional<std::string> describe_port_holder(std::uint16_t port);

}  // namespace maniple
