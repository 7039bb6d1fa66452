// Connects to other ranks' control listeners. PeerDialer dials in a thread of its own, as dialling blocks. ListenProbes
// only checks whether a process still listens at an address.
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
    SecureConnection connection;  ///< empty: the dial failed
    bool refused = false;         ///< no process listens at the address any more
    std::string why;
  };
  struct Task {
    Deadline::Duration delay{};  ///< before the dial
    Deadline::Duration limit{};  ///< of the dial itself
    std::function<SecureConnection(Deadline deadline, int cancel)> dial;
    std::function<void(Result)> done;  ///< runs in the dialler's thread; not called after a cancel
  };
  explicit PeerDialer(Task task);
  ~PeerDialer();  ///< gives a running handshake a little time, as breaking it off looks like an attack; then cancels

 private:
  void run();

  Task task_;
  UniqueFd cancel_;
  std::atomic<bool> dialling_{false};
  std::promise<void> finished_;
  std::thread thread_;
};

/// The state letter of a process on this host ('T' stopped, 'R' running, 'S' sleeping, ...); 0 if no such process
/// exists.
char process_state(int pid);

/// Connects and closes at once. Success does not show that the process runs: the kernel accepts for a stopped process.
/// Runs in the event loop's thread.
class ListenProbes {
 public:
  explicit ListenProbes(std::shared_ptr<EventLoop> loop) : loop_(std::move(loop)) {}
  ~ListenProbes() { stop(); }

  /// Calls `refused` if no process listens at `address`, either at once or when the reply arrives. One probe at a time
  /// for each `key`.
  void start(int key, const Address& address, std::function<void()> refused);
  void stop();

 private:
  void finish(int key, const std::function<void()>& refused);

  std::shared_ptr<EventLoop> loop_;
  std::map<int, UniqueFd> open_;
};

}  // namespace maniple
