#include "launch/agent_link.h"

#include <sys/socket.h>

#include <cerrno>

#include "base/codec.h"
#include "base/system_error.h"
#include "net/address.h"

namespace maniple::launch {
namespace {

constexpr std::size_t kLengthBytes = 4;
constexpr double kSilence_s = 10;  // after which a vanished host counts as lost

}  // namespace

AgentLink::AgentLink(Poller& poller, UniqueFd connection, Events events)
    : poller_(poller), fd_(std::move(connection)), events_(std::move(events)) {
  set_keepalive(fd_.get(), kSilence_s);
  poller_.watch(fd_.get(), EPOLLIN, [this](std::uint32_t ready) { on_ready(ready); });
}

AgentLink::~AgentLink() {
  *alive_ = false;
  if (fd_) poller_.forget(fd_.get());
}

void AgentLink::send(const AgentMessage& message) {
  if (!fd_) return;
  const std::string body = encode(message);
  ByteWriter frame;
  frame.put_string(body);
  out_ += frame.bytes();
  flush();
}

void AgentLink::flush() {
  while (!out_.empty()) {
    const ssize_t sent = ::send(fd_.get(), out_.data(), out_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) break;  // full, or gone: reading tells
    out_.erase(0, static_cast<std::size_t>(sent));
  }
  poller_.modify(fd_.get(), out_.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT);
}

void AgentLink::on_ready(std::uint32_t events) {
  const auto alive = alive_;
  if ((events & EPOLLOUT) != 0) flush();
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && *alive) read_some();
}

void AgentLink::read_some() {
  const auto alive = alive_;
  char buffer[16384];
  const ssize_t got = ::recv(fd_.get(), buffer, sizeof buffer, MSG_DONTWAIT);
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (got == 0) return lose("its launcher has gone");
  if (got < 0) return lose(errno_text(errno));
  in_.append(buffer, static_cast<std::size_t>(got));
  try {
    while (in_.size() >= kLengthBytes) {
      const auto length = ByteReader(in_).get<std::uint32_t>();
      if (length > kMaxAgentMessage) throw ProtocolError("a message of " + std::to_string(length) + " bytes");
      if (in_.size() < kLengthBytes + length) return;
      const AgentMessage message = decode_agent_message(std::string_view(in_).substr(kLengthBytes, length));
      in_.erase(0, kLengthBytes + length);
      events_.received(message);
      if (!*alive || !fd_) return;
    }
  } catch (const ProtocolError& error) {
    if (*alive) lose(error.what());
  }
}

void AgentLink::lose(const std::string& reason) {
  poller_.forget(fd_.get());
  fd_.reset();
  out_.clear();
  const auto lost = events_.lost;
  lost(reason);
}

}  // namespace maniple::launch
