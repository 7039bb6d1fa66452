// A connection between two launchers of a job. Messages are authenticated (see comm/net/message_stream.h), so that an
// attacker on the network cannot change the commands that are executed.
//
// Both ends send heartbeats from a separate thread, so a launcher that is busy with logs or waits for a slow disk does
// not fall silent. An end that receives nothing for longer than the limit sends Dropped and closes the connection. A
// stopped launcher reads that message when it continues.
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

/// The reason passed to `lost` when the peer has ended or has closed the connection.
inline constexpr const char* kLauncherGone = "its launcher has ended";

class AgentLink {
 public:
  struct Events {
    std::function<void(const AgentMessage&)> received;    ///< not called for heartbeats
    std::function<void(const std::string& reason)> lost;  ///< called once; may destroy the link
    /// The peer was silent for longer than the limit, but the tolerance is not used up. May be empty.
    std::function<void(std::chrono::duration<double> silence)> silent = {};
  };
  struct Options {
    Heartbeat heartbeat = {};
    std::chrono::duration<double> tolerance{0};  ///< how long to wait for a silent peer beyond the limit
    bool adopt = false;                          ///< use the peer's heartbeat settings: the coordinator's win
  };
  AgentLink(Poller& poller, SecureConnection connection, const Options& options, Events events);
  ~AgentLink();

  void send(const AgentMessage& message);
  /// All messages have been sent.
  bool drained() const;

 private:
  struct Wire;
  void on_ready(std::uint32_t events);
  void read_some();
  int write_error() const;
  std::string break_text(int error) const;
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
