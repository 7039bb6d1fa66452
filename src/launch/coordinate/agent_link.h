// A connection between two launchers of a job: authenticated messages (see comm/net/message_stream.h), so that nobody
// on the way can change what is executed.
//
// Both ends send heartbeats, from a thread of its own: a launcher that is busy with logs, or waits for a slow disk, is
// not silent. One that receives nothing at all for longer than the limit sends that it drops the other (which may be
// stopped, and read this when it goes on), and closes.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "comm/net/event_loop.h"
#include "comm/net/message_stream.h"
#include "comm/net/poller.h"
#include "launch/coordinate/agent_message.h"
#include "launch/coordinate/policies.h"

namespace maniple::launch {

/// Why a link is lost when the process at its other end has ended, or closed it.
inline constexpr const char* kLauncherGone = "its launcher has ended";

class AgentLink {
 public:
  struct Events {
    std::function<void(const AgentMessage&)> received;    ///< all but heartbeats
    std::function<void(const std::string& reason)> lost;  ///< once; the link may be destroyed in it
    /// Nothing was heard for longer than the limit, but there is tolerance left. May be empty.
    std::function<void(std::chrono::duration<double> silence)> silent = {};
  };
  struct Options {
    Heartbeat heartbeat = {};
    std::chrono::duration<double> tolerance{0};  ///< how long to go on waiting for one that is silent
    bool adopt = false;                          ///< take over the other's heartbeat: that of the coordinator counts
  };
  AgentLink(Poller& poller, SecureConnection connection, const Options& options, Events events);
  ~AgentLink();

  void send(const AgentMessage& message);
  /// Nothing is left to be sent.
  bool drained() const;

 private:
  struct Wire;
  void on_ready(std::uint32_t events);
  void read_some();
  void take(const AgentMessage& message);
  void set_heartbeat(const Heartbeat& heartbeat);
  void look_for_silence();
  void lose(const std::string& reason);

  Poller& poller_;
  std::shared_ptr<EventLoop> heartbeats_;
  std::shared_ptr<Wire> wire_;
  Events events_;
  Heartbeat heartbeat_;
  bool adopt_;
  std::chrono::duration<double> tolerance_;
  bool silence_reported_ = false;
  Poller::Clock::time_point heard_ = Poller::Clock::now();
  Poller::Clock::time_point looked_ = heard_;
  Poller::Timer timer_ = 0;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // false once destroyed, maybe inside a callback
};

}  // namespace maniple::launch
