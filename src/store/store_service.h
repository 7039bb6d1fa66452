// What a store's server does with requests, without any I/O. Not thread-safe.
//
// A request that waits is parked on the first of its keys that is missing; when that key comes it moves on to the next
// missing one, so it stands in one queue however many keys it names. Before the answer all keys are looked at once
// more, as one may have been erased in between.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "store/wire.h"

namespace maniple {

struct ServiceLimits {
  TableQuota table;
  std::size_t parked_per_client = 1024;
  std::size_t parked_bytes_per_client = std::size_t{64} << 20;
};

class StoreService {
 public:
  using Client = std::uint64_t;
  /// A reply is a list of pieces to be sent one after the other; large values are shared, not copied.
  using Reply = std::vector<Value>;
  using Send = std::function<void(Client, Reply)>;

  explicit StoreService(Send send, ServiceLimits limits = {})
      : send_(std::move(send)), limits_(limits), table_(limits.table) {}

  /// Answers now, or later when it has to wait. Throws ProtocolError if no client of ours would send this.
  void handle(Client client, Frame frame);
  void forget(Client client);  ///< its parked requests are dropped
  std::size_t parked() const noexcept { return parked_.size(); }

 private:
  using Ticket = std::uint64_t;
  struct Parked {
    Client client;
    std::uint32_t id;
    StoreOp op;
    std::vector<std::string> keys;
    std::size_t bytes;
    std::size_t at = 0;  // the missing key it is parked on
  };
  struct Waiting {
    std::map<std::uint32_t, Ticket> by_id;
    std::size_t bytes = 0;
  };

  void serve(Client client, StoreRequest request);
  void park(Client client, StoreRequest request);
  bool advance(Ticket ticket, Parked& parked);
  void wake(const std::string& key);
  void drop(Ticket ticket);
  void reply(Client client, std::uint32_t id, std::string body, StoreStatus status = StoreStatus::ok);
  void reply_values(const Parked& parked);

  Send send_;
  ServiceLimits limits_;
  KeyTable table_;
  Ticket next_ticket_ = 1;
  std::unordered_map<Ticket, Parked> parked_;
  std::unordered_map<std::string, std::set<Ticket>> queues_;  // in order of arrival
  std::unordered_map<Client, Waiting> waiting_;
};

}  // namespace maniple
