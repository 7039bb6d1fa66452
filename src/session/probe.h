// Whether anybody still listens at an address: a connection that is made and dropped. Says nothing about whether the process
// runs: the kernel answers for one that is stopped.
//
// Runs in the event loop's thread.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "base/unique_fd.h"
#include "net/address.h"
#include "net/event_loop.h"

namespace maniple {

/// The state letter of a process of this host: 'T' stopped, 'R' running, 'S' sleeping, ...; 0 if there is none.
char process_state(int pid);

class Probes {
 public:
  explicit Probes(std::shared_ptr<EventLoop> loop) : loop_(std::move(loop)) {}
  ~Probes() { stop(); }

  /// Calls `refused` if nobody listens there; at once, or when the answer comes. One at a time for each `key`.
  void start(int key, const Address& address, std::function<void()> refused);
  void stop();

 private:
  void finish(int key, const std::function<void()>& refused);

  std::shared_ptr<EventLoop> loop_;
  std::map<int, UniqueFd> open_;
};

}  // namespace maniple
