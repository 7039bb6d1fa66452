// Short messages between a run and its processes: lists of strings, one to a packet.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/base/unique_fd.h"

namespace maniple::harness {

using Message = std::vector<std::string>;

/// Two ends of a SOCK_SEQPACKET pair, both close-on-exec.
std::pair<UniqueFd, UniqueFd> make_channel();

/// False when the other end is gone. Long parts are cut: a packet has a limit.
bool send_message(int fd, Message message);

/// Blocks (or not); nullopt when nothing is there or the other end is gone, which `gone` tells.
std::optional<Message> receive_message(int fd, bool block, bool& gone);

}  // namespace maniple::harness
