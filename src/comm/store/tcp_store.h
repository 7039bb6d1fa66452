// The store over TCP: a server (inside rank 0, or in the launcher) and its clients.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/base/fork_guard.h"
#include "comm/base/mutex.h"
#include "comm/net/address.h"
#include "comm/net/handshake.h"
#include "comm/net/message_stream.h"
#include "comm/store/wire.h"
#include <maniple/comm/store.h>

namespace maniple {

/// Serves until destroyed. One thread, a thousand clients.
class TcpStoreServer {
 public:
  /// Binds exactly `address` (port 0: any free one).
  TcpStoreServer(const Address& address, const Identity& identity);
  ~TcpStoreServer();
  const Address& address() const noexcept;

  /// Serves clients that are connected, or connect meanwhile, until the last one has gone; then it is destroyed. A
  /// client that takes none of its replies for as long as `stall_limit`, or up to twice as long, is dropped.
  static void retire(std::shared_ptr<TcpStoreServer> server,
                     std::chrono::milliseconds stall_limit = std::chrono::seconds(60));
  /// Ends a server that retires, whoever is connected; its address is free once no one owns it. Others go on.
  void end_if_retiring();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  ForkGuard guard_;
};

/// The client: one connection to the server.
///
/// Threads that wait for replies share the connection, without a thread of its own: one of them reads, hands the others
/// their replies, and leaves the reading to the next when its own has arrived. So a thread that waits an hour for a key
/// never delays another one's set().
class TcpStoreClient final : public Store {
 public:
  /// `connection` is non-blocking and has keys.
  TcpStoreClient(SecureConnection connection, Address server, std::shared_ptr<void> keep);

  void set(std::string_view key, std::string_view value) override;
  std::string get(std::string_view key, Deadline deadline) override;
  std::vector<std::string> multi_get(std::span<const std::string> keys, Deadline deadline) override;
  void wait(std::span<const std::string> keys, Deadline deadline) override;
  std::vector<bool> check(std::span<const std::string> keys) override;
  std::int64_t add(std::string_view key, std::int64_t delta) override;
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired) override;
  bool erase(std::string_view key) override;
  std::int64_t num_keys() override;
  std::string describe() const override;

  /// Requests that wait for nothing but the server's answer end at `limit`, but have two seconds at least and two
  /// minutes at most.
  void limit_requests(Deadline limit);

 private:
  struct Call {
    std::optional<Frame> reply;
  };

  /// The reply's body; nullopt when the deadline passed first. Throws the error that the server replied with, or that
  /// the connection is lost.
  std::optional<std::string> call(StoreOp op, std::string_view head, std::string_view tail, Deadline deadline);
  Deadline request_limit();
  std::string call_now(StoreOp op, std::string_view head, std::string_view tail = {});
  std::string await_keys(StoreOp op, std::span<const std::string> keys, Deadline deadline);
  std::optional<std::vector<bool>> try_check(std::span<const std::string> keys, Deadline deadline);

  void send_frame(std::uint32_t id, StoreOp op, std::string_view head, std::string_view tail, Deadline deadline);
  void send_queued(Deadline deadline) MANIPLE_REQUIRES(send_mutex_);
  void await_room(Deadline deadline) MANIPLE_REQUIRES(send_mutex_);
  void lose(const std::string& reason, bool forged = false) MANIPLE_EXCLUDES(mutex_);
  std::optional<Frame> await_reply(std::uint32_t id, Call& call, Deadline deadline);
  /// Not checked: it unlocks the caller's `lock` while it reads.
  void read_for_all(MutexLock& lock, Deadline deadline) MANIPLE_REQUIRES(mutex_) MANIPLE_NO_THREAD_SAFETY_ANALYSIS;
  void read_available() MANIPLE_EXCLUDES(mutex_);
  [[noreturn]] void throw_lost(const std::string& reason) const MANIPLE_REQUIRES(mutex_);

  Address server_;
  ForkGuard guard_;
  MessageStream stream_;
  std::shared_ptr<void> keep_;

  Mutex send_mutex_;  // held while one frame is written to stream_; taken before mutex_

  Mutex mutex_;
  ForkSafeCondition changed_;
  Deadline request_limit_ MANIPLE_GUARDED_BY(mutex_);
  std::uint32_t next_id_ MANIPLE_GUARDED_BY(mutex_) = 1;
  std::map<std::uint32_t, Call*> calls_ MANIPLE_GUARDED_BY(mutex_);
  bool reading_ MANIPLE_GUARDED_BY(mutex_) =
      false;                                        // somebody reads; only that thread reads from stream_, into buffer_
  std::string lost_ MANIPLE_GUARDED_BY(mutex_);     // why the connection cannot be used any more
  bool forged_ MANIPLE_GUARDED_BY(mutex_) = false;  // because the bytes were not those that the other end had sent
  std::vector<char> buffer_ = std::vector<char>(std::size_t{16} << 10);
};

/// Connects, retrying until the deadline while the server is not up yet. `keep` (may be null) lives as long as the
/// client: rank 0 hands its server over that way.
std::shared_ptr<TcpStoreClient> connect_tcp_store(const std::string& host, std::uint16_t port, const Identity& identity,
                                                  Deadline deadline, std::shared_ptr<void> keep = nullptr);

}  // namespace maniple
