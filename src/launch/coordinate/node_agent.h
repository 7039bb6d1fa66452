// A node of the job: carries out the coordinator's messages with this host's workers.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "comm/net/address.h"
#include "comm/net/handshake.h"
#include "launch/coordinate/agent_message.h"
#include "launch/workers/worker_group.h"

namespace maniple::launch {

struct NodeSettings {
  WorkerGroupSettings worker_group;
  std::string job;
  int max_restarts = 0;
  Secret secret;             ///< of the job; the secret of each worker generation is derived from it
  bool own_secrets = false;  ///< one node: each generation gets a random secret, which avoids OpenSSL's 2 ms start-up
  Address master_address;    ///< where rank 0 may listen if it is on this node; its port may be 0
};

class NodeAgent {
 public:
  using Reply = std::function<void(const AgentMessage&)>;

  NodeAgent(Poller& poller, Console& console, NodeSettings settings, Reply reply);

  /// Handles Reserve, Start, Signal and Stop; other messages are not meant for a node.
  void handle(const AgentMessage& message);

  WorkerGroup& worker_group() noexcept { return worker_group_; }

 private:
  void reserve(const message::Reserve& asked);
  void start(const message::Start& start);
  void replace(const message::Replace& asked);
  void report_failed_start(const message::Start& start, const std::string& text, int code);

  NodeSettings settings_;
  Reply reply_;
  int generation_ = 0;
  UniqueFd reserved_;  // the port for rank 0: bound, but not listening
  UniqueFd secret_;    // inherited by workers
  WorkerGroup worker_group_;
};

/// The secret of one worker generation. Pure.
Secret secret_of_generation(const Secret& job, int generation);

}  // namespace maniple::launch
