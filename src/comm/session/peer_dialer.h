// Connecting to other ranks' control listeners: PeerDialer dials in a thread of its own, as dialling blocks and may
// have to be tried again; ListenProbes only finds out whether a process still listens at an address.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "comm/base/unique_fd.h"
#include "comm/net/address.h"
#include "comm/net/event_loop.h"
#include "comm/net/secure_connection.h"
#include <maniple/comm/deadline.h>

namespace maniple {

class PeerDialer {
 public:
  struct Result {
    SecureConnection connection;  ///< none: it could not be connected to
    bool refused = false;         ///< no process listens there any more
    std::string why;
  };
  struct Task {
    std::chrono::microseconds delay{0};  ///< before the first try
    Deadline::Duration one_try{};        ///< limit of a try
    std::function<SecureConnection(Deadline deadline, int cancel)> dial;
    std::function<bool(double tried_s)> hopeless;  ///< whether to give up, after so many seconds
    std::function<void(Result)> done;              ///< in that thread; not called when it is cancelled
  };
  explicit PeerDialer(Task task);
  ~PeerDialer();  ///< leaves a handshake that is under way a little time, as breaking it off looks like an attack; then
                  ///< cancels

 private:
  void run();

  Task task_;
  UniqueFd cancel_;
  std::atomic<bool> dialling_{false};
  std::promise<void> finished_;
  std::thread thread_;
};

/// The state letter of a process of this host: 'T' stopped, 'R' running, 'S' sleeping, ...; 0 if there is none.
char process_state(int pid);

/// Connects and closes at once. Says nothing about whether the process runs: the kernel answers for one that is
/// stopped. Runs in the event loop's thread.
class ListenProbes {
 public:
  explicit ListenProbes(std::shared_ptr<EventLoop> loop) : loop_(std::move(loop)) {}
  ~ListenProbes() { stop(); }

  /// Calls `refused` if no process listens there; at once, or when the answer arrives. One at a time for each `key`.
  void start(int key, const Address& address, std::function<void()> refused);
  void stop();

 private:
  void finish(int key, const std::function<void()>& refused);

  std::shared_ptr<EventLoop> loop_;
  std::map<int, UniqueFd> open_;
};

}  // namespace maniple
