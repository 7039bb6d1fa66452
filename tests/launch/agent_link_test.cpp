// A link between two launchers whose connection breaks.
#include <gtest/gtest.h>

#include <poll.h>
#include <sys/socket.h>

#include <csignal>

#include "comm/net/address.h"
#include "launch/coordinate/agent_link.h"

namespace maniple::launch {
namespace {

SecureConnection connection(UniqueFd fd, bool dialler) {
  return SecureConnection(std::move(fd), derive_keys(preferred_cipher(), TrafficSecret{}, "test", dialler));
}

/// The two ends of a connection over loopback.
std::pair<UniqueFd, UniqueFd> make_connection() {
  const UniqueFd listener = listen_on(Address::parse("127.0.0.1:0"));
  UniqueFd here = connect_to(Address::of_socket(listener.get()), Deadline::after(std::chrono::seconds(30)), false, -1);
  pollfd state{.fd = listener.get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&state, 1, 30'000), 1);
  return {std::move(here), UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC))};
}

short events_of(int fd) {
  pollfd state{.fd = fd, .events = 0, .revents = 0};
  return ::poll(&state, 1, 0) == 1 ? state.revents : short{0};
}

/// Why a link is lost whose peer ended the connection with `end`, once the heartbeat thread has noticed.
std::string reason_of_loss(void (*end)(UniqueFd peer)) {
  Poller poller;
  auto [here, there] = make_connection();
  const int fd = here.get();
  std::string reason;
  std::unique_ptr<AgentLink> link = std::make_unique<AgentLink>(
      poller, connection(std::move(here), true),
      AgentLink::Options{.heartbeat = {.interval = std::chrono::milliseconds(10)}},
      AgentLink::Events{.received = [](const AgentMessage&) {}, .lost = [&](const std::string& why) { reason = why; }});
  end(std::move(there));
  // The kernel reports POLLERR until a system call has received the error, here the heartbeat thread's.
  const Deadline limit = Deadline::after(std::chrono::seconds(30));
  while (!limit.expired() && (events_of(fd) & (POLLHUP | POLLERR)) != POLLHUP) ::poll(nullptr, 0, 1);
  EXPECT_EQ(events_of(fd) & (POLLHUP | POLLERR), POLLHUP);
  while (!limit.expired() && reason.empty()) poller.turn();
  return reason;
}

// A host that was cut off closes the connection without reading it, and its kernel resets it: that host may return.
TEST(AgentLink, AnErrorThatSendingReceivedIsNotTheEndOfTheLauncher) {
  const std::string reason = reason_of_loss([](UniqueFd peer) {
    const linger at_once{.l_onoff = 1, .l_linger = 0};
    ASSERT_EQ(::setsockopt(peer.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once), 0);
  });
  EXPECT_NE(reason, kLauncherGone);
  EXPECT_NE(reason.find("reset by peer"), std::string::npos) << reason;
}

TEST(AgentLink, AClosedConnectionIsTheEndOfTheLauncher) {
  // The first heartbeat after the end resets the connection; the second one gets EPIPE.
  EXPECT_EQ(reason_of_loss([](UniqueFd peer) { ::shutdown(peer.get(), SHUT_WR); }), kLauncherGone);
}

}  // namespace
}  // namespace maniple::launch
