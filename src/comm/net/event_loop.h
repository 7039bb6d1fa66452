// A Poller in a thread of its own: waits for many descriptors and timers. Callbacks run in that thread and must not
// block.
//
// A child of fork() has no such thread: there nothing that is added, posted or removed has an effect, and nothing
// waits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "comm/base/fork_guard.h"
#include "comm/net/poller.h"
#include <maniple/comm/deadline.h>

namespace maniple {

class EventLoop {
 public:
  /// `name` is the thread's name, at most 15 characters.
  explicit EventLoop(const char* name);
  ~EventLoop();  ///< stops and joins; not from its own thread

  /// The process's own loop: started at first use, stopped when the last owner lets go. Used by all groups. A child of
  /// fork() has its own.
  static std::shared_ptr<EventLoop> shared();

  /// Calls `ready(events)` whenever the descriptor has EPOLLIN/EPOLLOUT/... The owner of the descriptor calls remove()
  /// before closing it. add, modify and remove may be called from any thread; after remove() returns the callback is
  /// not running and will not run (when called inside a callback: it will not run again).
  /// A callback that throws is an error of its owner alone: the descriptor is removed from the loop, and `failed` is
  /// called with the reason, in the same thread; without it the reason is logged. Timers and posted callbacks that
  /// throw are logged.
  void add(int fd, std::uint32_t events, std::function<void(std::uint32_t)> ready,
           std::function<void(const std::string& why)> failed = {});
  void modify(int fd, std::uint32_t events);
  void remove(int fd);

  using Timer = Poller::Timer;
  Timer call_at(Deadline when, std::function<void()> callback);
  void cancel(Timer timer);  ///< afterwards the callback is not running and will not run

  void post(std::function<void()> callback);  ///< runs it soon, in the loop's thread
  void post_and_wait(
      std::function<void()> callback);  ///< the same, waits, throws what it threw; inline inside the loop
  bool inside() const noexcept;         ///< called from the loop's thread?

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
  ForkGuard guard_;
};

}  // namespace maniple
