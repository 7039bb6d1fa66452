#include "harness/messages.h"

#include <sys/socket.h>

#include <cerrno>
#include <system_error>

namespace maniple::harness {
namespace {

constexpr std::size_t kPartLimit = 24 * 1024;
constexpr std::size_t kPacketLimit = 128 * 1024;

}  // namespace

std::pair<UniqueFd, UniqueFd> make_channel() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw std::system_error(errno, std::generic_category(), "socketpair");
  }
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

bool send_message(int fd, Message message) {
  std::string packet;
  for (std::string& part : message) {
    if (part.size() > kPartLimit) part = part.substr(0, kPartLimit) + " ...";
    packet += part;
    packet += '\0';
  }
  ssize_t sent = 0;
  do {
    sent = ::send(fd, packet.data(), packet.size(), MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent >= 0;
}

std::optional<Message> receive_message(int fd, bool block, bool& gone) {
  std::string packet(kPacketLimit, '\0');
  ssize_t got = 0;
  do {
    got = ::recv(fd, packet.data(), packet.size(), block ? 0 : MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  gone = got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
  if (got <= 0) return std::nullopt;
  Message message;
  for (std::size_t begin = 0; begin < static_cast<std::size_t>(got);) {
    const std::size_t end = packet.find('\0', begin);
    message.push_back(packet.substr(begin, end - begin));
    begin = end + 1;
  }
  return message;
}

}  // namespace maniple::harness
