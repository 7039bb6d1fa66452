// A proxy between two processes that forwards their bytes and can tamper with them.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/net/address.h"
#include <maniple/comm/error.h>

namespace maniple::harness {

class Relay {
 public:
  enum Way { to_server, to_dialler };
  /// Returns the bytes to forward instead of `bytes`, which start at `offset` of this connection and direction. Runs in
  /// the relay's thread.
  using Tamper = std::function<std::string(Way way, std::size_t offset, std::string bytes)>;

  Relay(const Address& server, Tamper tamper)
      : server_(server), tamper_(std::move(tamper)), listener_(listen_on(Address::parse("127.0.0.1:0"))) {
    thread_ = std::thread([this] { run(); });
  }
  ~Relay() {
    ::eventfd_write(stop_.get(), 1);
    thread_.join();
  }
  Relay(const Relay&) = delete;

  Address address() const { return Address::of_socket(listener_.get()); }

  /// Forwards everything unchanged.
  static std::string honest(Way, std::size_t, std::string bytes) { return bytes; }

 private:
  struct Pair {
    std::array<UniqueFd, 2> ends;       // towards the dialler, towards the server
    std::array<std::size_t, 2> sent{};  // bytes sent by each end
    std::array<bool, 2> ended{false, false};
  };

  void run() {
    for (;;) {
      std::vector<pollfd> waiting = {{stop_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      for (const auto& pair : pairs_) {
        for (std::size_t end = 0; end < 2; ++end)
          waiting.push_back({pair->ended[end] ? -1 : pair->ends[end].get(), POLLIN, 0});
      }
      if (::poll(waiting.data(), waiting.size(), -1) < 0 && errno != EINTR) return;
      if (waiting[0].revents != 0) return;
      for (std::size_t i = 2; i < waiting.size(); ++i) {
        if (waiting[i].revents != 0) pass(*pairs_[(i - 2) / 2], i % 2);
      }
      std::erase_if(pairs_, [](const auto& pair) { return pair->ended[0] && pair->ended[1]; });
      if (waiting[1].revents != 0) admit();
    }
  }

  void admit() {
    auto pair = std::make_unique<Pair>();
    pair->ends[0].reset(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!pair->ends[0]) return;
    try {
      pair->ends[1] = connect_to(server_, Deadline::after(std::chrono::seconds(10)));
    } catch (const Error&) {
      return;
    }
    pairs_.push_back(std::move(pair));
  }

  void pass(Pair& pair, std::size_t from) {
    char buffer[65536];
    const ssize_t got = ::recv(pair.ends[from].get(), buffer, sizeof buffer, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
      pair.ended[from] = true;
      ::shutdown(pair.ends[1 - from].get(), SHUT_WR);
      return;
    }
    const Way way = from == 0 ? to_server : to_dialler;
    const std::string bytes = tamper_(way, pair.sent[from], std::string(buffer, static_cast<std::size_t>(got)));
    pair.sent[from] += static_cast<std::size_t>(got);
    std::string_view left = bytes;
    while (!left.empty()) {
      const ssize_t sent = ::send(pair.ends[1 - from].get(), left.data(), left.size(), MSG_NOSIGNAL);
      if (sent > 0) left.remove_prefix(static_cast<std::size_t>(sent));
      if (sent < 0 && errno == EAGAIN) {
        pollfd room{.fd = pair.ends[1 - from].get(), .events = POLLOUT, .revents = 0};
        ::poll(&room, 1, 1000);
      } else if (sent < 0 && errno != EINTR) {
        pair.ended[from] = true;
        return;
      }
    }
  }

  Address server_;
  Tamper tamper_;
  UniqueFd listener_;
  UniqueFd stop_{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::vector<std::unique_ptr<Pair>> pairs_;
  std::thread thread_;
};

}  // namespace maniple::harness
