// The request logic of a store's server, without I/O. Not thread-safe.
//
// A request that waits for keys is in the queue of its first missing key. When that key is set, the request moves to
// the queue of its next missing key, so it is always in exactly one queue. Before the reply, all keys are looked up
// again, because one may have been erased in the meantime.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "comm/store/wire.h"

namespace maniple {

struct ServiceLimits {
  TableQuota table;
  std::size_t pending_per_client = 1024;
  std::size_t pending_bytes_per_client = std::size_t{64} << 20;
};

class StoreService {
 public:
  using Client = std::uint64_t;
  /// A reply is a list of pieces to send in order; large values are shared, not copied.
  using Reply = std::vector<Value>;
  using Send = std::function<void(Client, Reply)>;

  explicit StoreService(Send send, ServiceLimits limits = {})
      : send_(std::move(send)), limits_(limits), table_(limits.table) {}

  /// Replies now, or later if the request waits for keys. Throws ProtocolError for a request that Maniple's client
  /// would never send.
  void handle(Client client, Frame frame);
  void forget(Client client);  ///< call when the client is gone; drops its pending requests
  std::size_t pending() const noexcept { return pending_.size(); }

 private:
  using Ticket = std::uint64_t;
  struct Pending {
    Client client;
    std::uint32_t id;
    StoreOp op;
    std::vector<std::string> keys;
    std::size_t bytes;
    std::size_t at = 0;  // index of the missing key in whose queue the request is
  };
  struct Waiting {
    std::map<std::uint32_t, Ticket> by_id;
    std::size_t bytes = 0;
  };

  void serve(Client client, StoreRequest request);
  void enqueue(Client client, StoreRequest request);
  bool advance(Ticket ticket, Pending& pending);
  void wake(const std::string& key);
  void drop(Ticket ticket);
  void reply(Client client, std::uint32_t id, std::string body, StoreStatus status = StoreStatus::ok);
  void reply_values(const Pending& pending);

  Send send_;
  ServiceLimits limits_;
  KeyTable table_;
  Ticket next_ticket_ = 1;
  std::unordered_map<Ticket, Pending> pending_;
  std::unordered_map<std::string, std::set<Ticket>> queues_;  // in order of arrival
  std::unordered_map<Client, Waiting> waiting_;
};

}  // namespace maniple
