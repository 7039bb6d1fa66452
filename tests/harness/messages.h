// Short messages between a run and its processes: lists of strings, one list per packet.
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

/// Returns false when the other end is gone. Truncates long strings, because packet size is limited.
bool send_message(int fd, Message message);

/// Waits for a message if `block`. nullopt if there is no message or the other end is gone; sets `gone` accordingly.
std::optional<Message> receive_message(int fd, bool block, bool& gone);

}  // namespace maniple::harness
