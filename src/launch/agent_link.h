// A connection between two launchers of a job, authenticated already: messages with their length before them.
#pragma once

#include <functional>
#include <string>

#include "base/unique_fd.h"
#include "launch/agent_message.h"
#include "launch/poller.h"

namespace maniple::launch {

class AgentLink {
 public:
  struct Events {
    std::function<void(const AgentMessage&)> received;
    std::function<void(const std::string& reason)> lost;  ///< once; the link may be destroyed in it
  };
  AgentLink(Poller& poller, UniqueFd connection, Events events);
  ~AgentLink();

  void send(const AgentMessage& message);
  /// Nothing is left to be sent.
  bool drained() const noexcept { return out_.empty(); }

 private:
  void on_ready(std::uint32_t events);
  void read_some();
  void flush();
  void lose(const std::string& reason);

  Poller& poller_;
  UniqueFd fd_;
  Events events_;
  std::string in_;
  std::string out_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // false once destroyed, maybe inside a callback
};

}  // namespace maniple::launch
