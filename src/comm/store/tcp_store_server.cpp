// The server of the store over TCP. One thread serves all clients: it reads requests, passes them to the StoreService
// and writes replies as the sockets accept them.
#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/log.h"
#include "comm/base/system_error.h"
#include "comm/net/event_loop.h"
#include "comm/store/store_service.h"
#include "comm/store/tcp_store.h"

namespace maniple {
namespace {

// Beyond the first limit of queued replies, the server stops reading from a client until they have drained. Beyond the
// second limit, it drops the client.
constexpr std::size_t kPauseReadingBytes = std::size_t{4} << 20;
constexpr std::size_t kMaxPendingBytes = std::size_t{512} << 20;
// A client's share per round, so that a large value does not delay the others.
constexpr std::size_t kReadBytes = 64 * 1024;
constexpr int kReadsAtOnce = 8;

struct Connection {
  Connection(SecureConnection link, const Address& other, int other_rank)
      : stream(std::move(link), kStoreRequests), peer(other), rank(other_rank) {}

  MessageStream stream;
  Address peer;
  int rank = -1;
  std::uint32_t events = EPOLLIN;
  bool stalled = false;     // replies have been queued since the last check, and none was read
  bool closing = false;     // close once everything is written
  std::string drop_reason;  // why to drop the client; empty: keep it

  bool is_paused() const noexcept { return closing || stream.queued_bytes() > kPauseReadingBytes; }
};

}  // namespace

struct TcpStoreServer::Impl {
  using Client = StoreService::Client;

  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("maniple-store");
  StoreService service{[this](Client client, StoreService::Reply reply) { enqueue(client, std::move(reply)); }};
  std::unordered_map<Client, Connection> clients;
  std::vector<Client> dropped;  // dropped at the end of the round: the service may be using them
  Client next_client = 1;
  double heartbeat_s = knob_number(Knob::heartbeat_s);
  ThrottledLog log;
  std::vector<char> buffer = std::vector<char>(kReadBytes);
  std::shared_ptr<TcpStoreServer> retiring;  // the server itself, once it has no other owner
  EventLoop::Timer stall_timer = 0;          // set while the server retires
  Address address;
  std::unique_ptr<Acceptor> acceptor;  // last member: from its creation on peers may connect

  void admit(SecureConnection link, const Hello& hello, const Address& peer) {
    const Client client = next_client++;
    Connection& connection = clients.try_emplace(client, std::move(link), peer, hello.rank).first->second;
    set_liveness(connection.stream.fd(), heartbeat_s);
    loop->add(
        connection.stream.fd(), EPOLLIN, [this, client](std::uint32_t events) { on_ready(client, events); },
        [this, client](const std::string& why) { on_failed(client, why); });
  }

  void on_ready(Client client, std::uint32_t events) {
    const auto found = clients.find(client);
    if (found == clients.end()) return;
    Connection& connection = found->second;
    if ((events & EPOLLOUT) != 0) {
      connection.stalled = false;
      flush(client, connection);
    }
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && connection.drop_reason.empty())
      read_some(client, connection);
    remove_dropped();
  }

  // An unexpected error while serving this client, typically lack of memory, closes only this client's connection.
  void on_failed(Client client, const std::string& why) {
    const auto found = clients.find(client);
    if (found != clients.end() && found->second.drop_reason.empty()) drop(client, found->second, why);
    remove_dropped();
  }

  void read_some(Client client, Connection& connection) {
    for (int i = 0; i < kReadsAtOnce; ++i) {
      if (connection.is_paused() || !connection.drop_reason.empty()) return;
      const auto received = connection.stream.receive(buffer);
      switch (received.state) {
        case MessageStream::Received::State::nothing: return;
        case MessageStream::Received::State::end:
          return drop(client, connection, std::string(connection.stream.end_text()));
        case MessageStream::Received::State::broken: return drop(client, connection, errno_text(received.error));
        case MessageStream::Received::State::bytes: break;
      }
      take(client, connection);
      if (received.bytes < buffer.size()) return;
    }
  }

  void take(Client client, Connection& connection) {
    try {
      while (auto message = connection.stream.next()) service.handle(client, frame_of(std::move(*message)));
    } catch (const ProtocolError& error) {
      log.warn("protocol", fmt::format("store at {} closes the connection to {} (rank {}): {}", address.to_string(),
                                       connection.peer.to_string(), connection.rank, error.what()));
      connection.closing = true;
      const std::string text = error.what();
      const auto status = static_cast<std::uint8_t>(StoreStatus::protocol);
      enqueue(client, {std::make_shared<const std::string>(
                          encode_frame_header(frame_id(connection.stream.header()), status, text.size()) + text)});
    } catch (const std::bad_alloc&) {
      drop(client, connection, "out of memory");
    }
  }

  void enqueue(Client client, StoreService::Reply reply) {
    const auto found = clients.find(client);
    if (found == clients.end() || !found->second.drop_reason.empty()) return;
    Connection& connection = found->second;
    for (Value& piece : reply) connection.stream.queue(std::move(piece));
    if (connection.stream.queued_bytes() > kMaxPendingBytes)
      return drop(client, connection, "it does not read its replies");
    flush(client, connection);
  }

  void flush(Client client, Connection& connection) {
    if (const int error = connection.stream.flush(); error != 0) return drop(client, connection, errno_text(error));
    const bool written = connection.stream.idle();
    if (written) connection.stalled = false;
    if (connection.closing && written) return drop(client, connection, "connection closed after a protocol error");
    const std::uint32_t events = (written ? 0u : EPOLLOUT) | (connection.is_paused() ? 0u : EPOLLIN);
    if (events == connection.events) return;
    connection.events = events;
    loop->modify(connection.stream.fd(), events);
  }

  void drop(Client client, Connection& connection, std::string reason) {
    if (!connection.drop_reason.empty()) return;
    log_debug("store at {}: drops client {} (rank {}): {}", address.to_string(), connection.peer.to_string(),
              connection.rank, reason);
    connection.drop_reason = std::move(reason);
    dropped.push_back(client);
  }

  void remove_dropped() {
    for (const Client client : dropped) {
      service.forget(client);
      const auto found = clients.find(client);
      loop->remove(found->second.stream.fd());
      clients.erase(found);
    }
    dropped.clear();
    leave_if_empty();
  }

  void leave_if_empty() {
    if (!clients.empty() || !retiring) return;
    // Posted, because this object must not be destroyed while one of its callbacks runs. A client admitted before the
    // posted callback runs was promised a reply, so it is served like earlier clients.
    loop->post([this, self = retiring] {
      if (clients.empty()) retiring.reset();
    });
  }

  /// Drops clients that do not read: one stopped in the middle of a reply would keep a retired server for ever.
  void drop_stalled(std::chrono::milliseconds stall_limit) {
    loop->cancel(stall_timer);
    if (!retiring) return;  // it has an owner again
    for (auto& [client, connection] : clients) {
      const bool was_stalled = std::exchange(connection.stalled, !connection.stream.idle());
      if (was_stalled && connection.stalled)
        drop(client, connection, "it takes no replies, and this server has retired");
    }
    stall_timer = loop->call_at(Deadline::after(stall_limit), [this, stall_limit] { drop_stalled(stall_limit); });
    remove_dropped();
  }

  ~Impl() {
    acceptor.reset();
    loop->post_and_wait([this] {
      loop->cancel(stall_timer);
      for (auto& [client, connection] : clients) loop->remove(connection.stream.fd());
      clients.clear();
    });
  }
};

TcpStoreServer::TcpStoreServer(const Address& address, const Identity& identity) : impl_(std::make_unique<Impl>()) {
  Impl* impl = impl_.get();
  UniqueFd listener = listen_on(address);
  impl->address = Address::of_socket(listener.get());
  impl->acceptor = std::make_unique<Acceptor>(
      impl->loop, std::move(listener), identity,
      Acceptor::Owner{.refusal = [](const Hello& hello, const Address&) -> std::string {
                        return hello.role == Role::store ? "" : "this is the store, not a data listener";
                      },
                      .accept = [impl](SecureConnection link, const Hello& hello,
                                       const Address& peer) { impl->admit(std::move(link), hello, peer); }});
}

TcpStoreServer::~TcpStoreServer() = default;

const Address& TcpStoreServer::address() const noexcept { return impl_->address; }

void TcpStoreServer::retire(std::shared_ptr<TcpStoreServer> server, std::chrono::milliseconds stall_limit) {
  if (!server->guard_.owned()) return abandon(server);
  Impl* impl = server->impl_.get();
  EventLoop& loop = *impl->loop;
  loop.post([impl, stall_limit, server = std::move(server)] {
    if (!std::exchange(impl->retiring, server)) impl->drop_stalled(stall_limit);
  });
}

void TcpStoreServer::end_if_retiring() {
  std::shared_ptr<TcpStoreServer> self;  // released in this thread: the destructor waits for the loop
  impl_->loop->post_and_wait([&] { self = std::exchange(impl_->retiring, nullptr); });
}

}  // namespace maniple
