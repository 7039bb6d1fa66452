// The store over TCP: a server (inside rank 0, or in the launcher) and its clients.
#pragma once

#include <memory>
#include <string>

#include "net/address.h"
#include "net/handshake.h"
#include <maniple/comm/store.h>

namespace maniple {

/// Serves until destroyed. One thread, a thousand clients.
class TcpStoreServer {
 public:
  /// Binds exactly `address` (port 0: any free one).
  TcpStoreServer(const Address& address, const Identity& identity);
  ~TcpStoreServer();
  const Address& address() const noexcept;

  /// Serves those who are connected, or connect meanwhile, until the last of them has gone; then it is destroyed.
  static void retire(std::shared_ptr<TcpStoreServer> server);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Connects, retrying until the deadline while the server is not up yet. `keep` (may be null) lives as long as the
/// client: rank 0 hands its server over that way.
std::shared_ptr<Store> connect_tcp_store(const std::string& host, std::uint16_t port, const Identity& identity,
                                         Deadline deadline, std::shared_ptr<void> keep = nullptr);

}  // namespace maniple
