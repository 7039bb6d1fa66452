// The store over TCP: a server (in rank 0 or in the launcher) and its clients.
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

/// Serves until destroyed. One thread handles a thousand clients.
class TcpStoreServer {
 public:
  /// Binds exactly `address` (port 0: any free one).
  TcpStoreServer(const Address& address, const Identity& identity);
  ~TcpStoreServer();
  const Address& address() const noexcept;

  /// Keeps serving current and new clients until the last one disconnects, then destroys the server. Drops a client
  /// that does not read its replies for `stall_limit`, or up to twice as long.
  static void retire(std::shared_ptr<TcpStoreServer> server,
                     std::chrono::milliseconds stall_limit = std::chrono::seconds(60));
  /// If the server is retiring, ends it regardless of connected clients; its address is free once the last owner
  /// releases it. Has no effect on other servers.
  void end_if_retiring();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  ForkGuard guard_;
};

/// A client: one connection to the server.
///
/// Threads that wait for replies share the connection, without a dedicated thread. One of them reads and hands the
/// others their replies; when its own reply has arrived, another thread takes over reading. So a thread that waits an
/// hour for a key never delays another thread's set().
class TcpStoreClient final : public Store {
 public:
  /// `connection` must be non-blocking and have keys.
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

  /// Limits requests that wait only for the server's reply, not for keys: they end at `limit`, but get at least two
  /// seconds and at most two minutes.
  void limit_requests(Deadline limit);

 private:
  struct Call {
    std::optional<Frame> reply;
  };

  /// The reply's body; nullopt if the deadline passed first. Throws the error in the server's reply, or an error if the
  /// connection is lost.
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
  CondVar changed_;
  Deadline request_limit_ MANIPLE_GUARDED_BY(mutex_);
  std::uint32_t next_id_ MANIPLE_GUARDED_BY(mutex_) = 1;
  std::map<std::uint32_t, Call*> calls_ MANIPLE_GUARDED_BY(mutex_);
  bool reading_ MANIPLE_GUARDED_BY(mutex_) = false;  // a thread is reading; only it uses stream_'s input and buffer_
  std::string lost_ MANIPLE_GUARDED_BY(mutex_);      // why the connection is unusable
  bool forged_ MANIPLE_GUARDED_BY(mutex_) = false;   // lost_ because the received bytes were not authentic
  std::vector<char> buffer_ = std::vector<char>(std::size_t{16} << 10);
};

/// Connects, retrying until the deadline while the server is not up yet. `keep` (may be null) lives as long as the
/// client; rank 0 passes its server this way.
std::shared_ptr<TcpStoreClient> connect_tcp_store(const std::string& host, std::uint16_t port, const Identity& identity,
                                                  Deadline deadline, std::shared_ptr<void> keep = nullptr);

}  // namespace maniple
