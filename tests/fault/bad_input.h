// What the tests of bad input share: a raw connection, a listener to throw things at, and what to look at afterwards.
// Tests carry the numbers of the list of bad inputs; most run against a store's server and against a plain acceptor.
#pragma once

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <string>
#include <thread>

#include "comm/net/handshake_wire.h"
#include "comm/store/tcp_store.h"
#include <maniple/comm/error.h>

namespace maniple {

inline Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

inline double seconds_since(Deadline::Clock::time_point start) {
  return std::chrono::duration<double>(Deadline::Clock::now() - start).count();
}

inline std::size_t resident_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmRSS:", 0) == 0) return std::stoul(line.substr(6));
  }
  return 0;
}

/// A raw connection, as an unauthenticated peer has it.
class Raw {
 public:
  explicit Raw(const Address& address) : fd_(connect_to(address, soon())) {}
  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno == EAGAIN) {
        pollfd room{.fd = fd_.get(), .events = POLLOUT, .revents = 0};
        ::poll(&room, 1, 100);
        continue;
      }
      if (sent < 0) return;  // it has hung up, which the reader will see
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
  }
  /// Until the other side has taken everything in, so that what follows is a segment of its own.
  void wait_until_idle() {
    int unsent = 1;
    while (::ioctl(fd_.get(), SIOCOUTQ, &unsent) == 0 && unsent > 0) std::this_thread::yield();
  }
  std::string receive(std::size_t count) {
    std::string bytes(count, '\0');
    std::size_t got = 0;
    while (got < count && readable(soon())) {
      const ssize_t more = ::recv(fd_.get(), bytes.data() + got, count - got, 0);
      if (more == 0 || (more < 0 && errno != EAGAIN)) break;
      if (more > 0) got += static_cast<std::size_t>(more);
    }
    bytes.resize(got);
    return bytes;
  }
  bool readable(Deadline deadline) {
    pollfd waiting{.fd = fd_.get(), .events = POLLIN, .revents = 0};
    return ::poll(&waiting, 1, deadline.poll_ms()) > 0;
  }
  /// Whether the other side closes it before the deadline; `rest` gets what it sent before.
  bool closed_by(Deadline deadline, std::string* rest = nullptr) {
    while (readable(deadline)) {
      char bytes[4096];
      const ssize_t got = ::recv(fd_.get(), bytes, sizeof(bytes), 0);
      if (got == 0 || (got < 0 && errno != EAGAIN)) return true;
      if (got > 0 && rest != nullptr) rest->append(bytes, static_cast<std::size_t>(got));
    }
    return false;
  }
  std::uint16_t port() const { return Address::of_socket(fd_.get()).port(); }
  int fd() const { return fd_.get(); }
  void reset_connection() {
    const linger hard{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
    fd_.reset();
  }

 private:
  UniqueFd fd_;
};

/// A listener under test.
struct Target {
  explicit Target(const std::string& kind) : is_store(kind == "store") {
    identity.secret = Secret::random();
    identity.job = "training";
    identity.generation = 4;
    identity.world_size = 8;
    if (is_store) {
      server = std::make_unique<TcpStoreServer>(Address::parse("127.0.0.1:0"), identity);
    } else {
      const Acceptor::Owner owner{.refusal = {},
                                  .accept = [this](SecureConnection, const Hello&, const Address&) { ++accepted; }};
      acceptor = std::make_unique<Acceptor>(loop, listen_on(Address::parse("127.0.0.1:0")), identity, owner,
                                            HandshakeLimits{.handshake = std::chrono::milliseconds(1500)});
    }
  }
  Address address() const { return is_store ? server->address() : acceptor->address(); }
  double handshake_seconds() const { return is_store ? 5.0 : 1.5; }

  SecureConnection dial_in(const Identity& as, std::int32_t rank = 1) const {
    return dial(address(), as, {.role = Role::store, .rank = rank, .topic = "x"}, soon());
  }
  std::string refusal(const Identity& as, std::int32_t rank = 1) const {
    try {
      dial_in(as, rank);
    } catch (const ProtocolError& error) {
      return error.what();
    }
    return "accepted";
  }
  bool serves() const { return static_cast<bool>(dial_in(identity)); }
  WireHello hello() const {
    WireHello wire{
        .role = Role::store, .generation = 4, .world_size = 8, .rank = 1, .nonce = {}, .job = "training", .topic = "x"};
    fill_random(wire.nonce);
    return wire;
  }

  bool is_store;
  Identity identity;
  std::atomic<int> accepted{0};
  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("test");
  std::unique_ptr<Acceptor> acceptor;
  std::unique_ptr<TcpStoreServer> server;
};

/// Against the kind of listener that the parameter names; after each input it must still serve its own.
class BadInput : public testing::TestWithParam<const char*> {
 protected:
  template <class F>
  std::string logged(F&& body) {
    testing::internal::CaptureStderr();
    body();
    EXPECT_TRUE(target.serves());  // also: whatever was sent before has been dealt with
    return testing::internal::GetCapturedStderr();
  }
  Target target{GetParam()};
};

inline const auto kListeners = testing::Values("store", "data");
inline const auto kListenerName = [](const testing::TestParamInfo<const char*>& kind) {
  return std::string(kind.param);
};

}  // namespace maniple
