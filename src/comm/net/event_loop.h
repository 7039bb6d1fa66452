// A Poller in its own thread: waits for many descriptors and timers. Callbacks run in that thread and must not block.
//
// A child of fork() does not have that thread: adding, posting and removing have no effect there, and nothing waits.
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
  ~EventLoop();  ///< stops and joins; in the loop's own thread, detaches instead

  /// The loop shared by all groups of this process: started at first use, stopped when the last owner releases it. A
  /// child of fork() has its own.
  static std::shared_ptr<EventLoop> shared();

  /// Calls `ready(events)` whenever the descriptor has EPOLLIN/EPOLLOUT/... The owner of the descriptor calls remove()
  /// before closing it. add, modify and remove may be called from any thread. After remove() returns, the callback is
  /// not running and will not run; when called inside a callback, it will not run again.
  /// A throwing callback affects only its owner: the descriptor is removed from the loop, and `failed` is called with
  /// the reason, in the same thread. Without `failed` the reason is logged. Timers and posted callbacks that throw are
  /// logged.
  void add(int fd, std::uint32_t events, std::function<void(std::uint32_t)> ready,
           std::function<void(const std::string& why)> failed = {});
  void modify(int fd, std::uint32_t events);
  void remove(int fd);

  using Timer = Poller::Timer;
  Timer call_at(Deadline when, std::function<void()> callback);
  void cancel(Timer timer);  ///< on return the callback is not running and will not run

  void post(std::function<void()> callback);  ///< runs it soon, in the loop's thread
  void post_and_wait(
      std::function<void()> callback);  ///< posts and waits; rethrows its exception; runs inline in the loop's thread
  bool inside() const noexcept;         ///< whether the caller is the loop's thread

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
  ForkGuard guard_;
};

}  // namespace maniple
