// The server of the store over TCP: one thread for all clients, which reads requests, hands them to the StoreService and writes its
// replies as the sockets take them.
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/environment.h"
#include "base/log.h"
#include "base/system_error.h"
#include "base/write_all.h"
#include "net/event_loop.h"
#include "store/store_service.h"
#include "store/tcp_store.h"

namespace maniple {
namespace {

// A client whose replies pile up beyond the first is not read from until they have drained; beyond the second it is
// dropped.
constexpr std::size_t kPauseReadingBytes = std::size_t{4} << 20;
constexpr std::size_t kMaxPendingBytes = std::size_t{512} << 20;
// One client's turn, so that a large value does not hold up the others.
constexpr std::size_t kReadBytes = 64 * 1024;
constexpr int kReadsAtOnce = 8;
constexpr std::size_t kKeptBytes = 4096;  // of a record's memory, for the next

struct Connection {
  Connection(SecureConnection link, const Address& other, int other_rank)
      : fd(std::move(link.fd)),
        peer(other),
        rank(other_rank),
        opener(link.keys.value().cipher, link.keys->receive),
        sealer(link.keys->cipher, link.keys->send) {}

  UniqueFd fd;
  Address peer;
  int rank = -1;
  RecordOpener opener;
  FrameReader reader{&request_limit};
  RecordSealer sealer;
  std::string sealed;  // the record that is being sent
  std::size_t sealed_offset = 0;
  std::deque<Value> out;
  std::size_t out_offset = 0;  // into the front piece
  std::size_t out_bytes = 0;   // not in a record yet
  std::uint32_t events = EPOLLIN;
  bool closing = false;     // once everything is written
  std::string drop_reason;  // why it is to be dropped; empty: it is not
};

}  // namespace

struct TcpStoreServer::Impl {
  using Client = StoreService::Client;

  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("maniple-store");
  StoreService service{[this](Client client, StoreService::Reply reply) { enqueue(client, std::move(reply)); }};
  std::unordered_map<Client, Connection> clients;
  std::vector<Client> dropped;  // dropped at the end of the round: the service may be in the middle of using them
  Client next_client = 1;
  double heartbeat_s = knob_number(Knob::heartbeat_s);
  ThrottledLog log;
  std::vector<char> buffer = std::vector<char>(kReadBytes);
  std::shared_ptr<TcpStoreServer> retiring;  // itself, once nobody else owns it
  Address address;
  std::unique_ptr<Acceptor> acceptor;  // last: from here on peers may connect

  void admit(SecureConnection link, const Hello& hello, const Address& peer) {
    const Client client = next_client++;
    Connection& connection = clients.try_emplace(client, std::move(link), peer, hello.rank).first->second;
    set_liveness(connection.fd.get(), heartbeat_s);
    loop->add(
        connection.fd.get(), EPOLLIN, [this, client](std::uint32_t events) { on_ready(client, events); },
        [this, client](const std::string& why) { on_failed(client, why); });
  }

  void on_ready(Client client, std::uint32_t events) {
    const auto found = clients.find(client);
    if (found == clients.end()) return;
    Connection& connection = found->second;
    if ((events & EPOLLOUT) != 0) flush(client, connection);
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && connection.drop_reason.empty())
      read_some(client, connection);
    remove_dropped();
  }

  // Something unforeseen while serving this client, lack of memory above all: it loses its connection, the others do not.
  void on_failed(Client client, const std::string& why) {
    const auto found = clients.find(client);
    if (found != clients.end() && found->second.drop_reason.empty()) drop(client, found->second, why);
    remove_dropped();
  }

  void read_some(Client client, Connection& connection) {
    for (int i = 0; i < kReadsAtOnce; ++i) {
      if (connection.closing || connection.out_bytes > kPauseReadingBytes || !connection.drop_reason.empty()) return;
      const ssize_t got = ::recv(connection.fd.get(), buffer.data(), buffer.size(), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) return;
      if (got <= 0) return drop(client, connection, got == 0 ? "closed" : errno_text(errno));
      take(client, connection, std::span(buffer.data(), static_cast<std::size_t>(got)));
      if (static_cast<std::size_t>(got) < buffer.size()) return;
    }
  }

  void take(Client client, Connection& connection, std::span<char> bytes) {
    try {
      while (auto plain = connection.opener.next(bytes)) {
        while (auto frame = connection.reader.next(*plain)) service.handle(client, std::move(*frame));
      }
    } catch (const ProtocolError& error) {
      log.warn("protocol", fmt::format("store at {} closes the connection to {} (rank {}): {}", address.to_string(),
                                       connection.peer.to_string(), connection.rank, error.what()));
      connection.closing = true;
      const std::string text = error.what();
      const auto status = static_cast<std::uint8_t>(StoreStatus::protocol);
      enqueue(client, {std::make_shared<const std::string>(
                          encode_frame_header(connection.reader.current_id(), status, text.size()) + text)});
    } catch (const std::bad_alloc&) {
      drop(client, connection, "out of memory");
    }
  }

  void enqueue(Client client, StoreService::Reply reply) {
    const auto found = clients.find(client);
    if (found == clients.end() || !found->second.drop_reason.empty()) return;
    Connection& connection = found->second;
    for (Value& piece : reply) {
      connection.out_bytes += piece->size();
      connection.out.push_back(std::move(piece));
    }
    if (connection.out_bytes > kMaxPendingBytes) return drop(client, connection, "it does not read its replies");
    flush(client, connection);
  }

  void flush(Client client, Connection& connection) {
    while (fill(connection)) {
      const std::string_view left = std::string_view(connection.sealed).substr(connection.sealed_offset);
      const std::size_t sent = send_all(connection.fd.get(), left);
      connection.sealed_offset += sent;
      if (sent == left.size()) continue;
      if (errno == EAGAIN) break;
      return drop(client, connection, errno_text(errno));
    }
    const bool written = connection.sealed.empty();
    if (connection.closing && written) return drop(client, connection, "connection closed after a protocol error");
    const std::uint32_t events =
        (written ? 0u : EPOLLOUT) | (connection.closing || connection.out_bytes > kPauseReadingBytes ? 0u : EPOLLIN);
    if (events == connection.events) return;
    connection.events = events;
    loop->modify(connection.fd.get(), events);
  }

  /// Puts what comes next into a record, once the one before has been sent. False when there is nothing to send. One
  /// record at a time: values are shared by all that read them, and no more than 64 KiB is copied for one client.
  static bool fill(Connection& connection) {
    if (connection.sealed_offset < connection.sealed.size()) return true;
    connection.sealed_offset = 0;
    connection.sealed.clear();
    if (connection.sealed.capacity() > kKeptBytes && connection.out.empty()) connection.sealed = {};
    constexpr std::size_t kMostParts = 16;
    iovec parts[kMostParts];
    std::size_t count = 0;
    std::size_t size = 0;
    for (auto piece = connection.out.begin(); piece != connection.out.end() && count < kMostParts; ++piece, ++count) {
      const std::size_t skip = count == 0 ? connection.out_offset : 0;
      // iovec has no const; sealing does not write.
      parts[count] = {const_cast<char*>((*piece)->data()) + skip, (*piece)->size() - skip};
      size += parts[count].iov_len;
    }
    size = std::min(size, kMaxRecordBytes);
    if (size > 0) {
      connection.sealed.resize(size + kRecordOverhead);
      connection.sealer.seal_record(std::span(parts, count), size, connection.sealed.data());
    }
    consume(connection, size);
    return size > 0;
  }

  static void consume(Connection& connection, std::size_t sent) {
    connection.out_bytes -= sent;
    while (sent > 0) {
      const std::size_t left = connection.out.front()->size() - connection.out_offset;
      if (sent < left) {
        connection.out_offset += sent;
        return;
      }
      sent -= left;
      connection.out.pop_front();
      connection.out_offset = 0;
    }
    while (!connection.out.empty() && connection.out.front()->empty()) connection.out.pop_front();
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
      loop->remove(found->second.fd.get());
      clients.erase(found);
    }
    dropped.clear();
    leave_if_empty();
  }

  void leave_if_empty() {
    if (!clients.empty() || !retiring) return;
    // Posted, as this object must not go while one of its callbacks is running. A client that is admitted before the post
    // has its turn was promised a reply: then it is served like those before it.
    loop->post([this, self = retiring] {
      if (clients.empty()) retiring.reset();
    });
  }

  ~Impl() {
    acceptor.reset();
    loop->post_and_wait([this] {
      for (auto& [client, connection] : clients) loop->remove(connection.fd.get());
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

void TcpStoreServer::retire(std::shared_ptr<TcpStoreServer> server) {
  if (!server->guard_.owned()) return abandon(server);
  Impl* impl = server->impl_.get();
  EventLoop& loop = *impl->loop;
  loop.post([impl, server = std::move(server)] {
    impl->retiring = server;
    impl->leave_if_empty();
  });
}

void TcpStoreServer::end_if_retiring() {
  std::shared_ptr<TcpStoreServer> self;  // released here: the destructor waits for the loop
  impl_->loop->post_and_wait([&] { self = std::exchange(impl_->retiring, nullptr); });
}

}  // namespace maniple
