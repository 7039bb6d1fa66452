// Waits for descriptors and timers, and runs their callbacks in the waiting thread.
//
//   Poller poller;
//   poller.add(fd, EPOLLIN, [&](std::uint32_t events) { ... });
//   while (!done) poller.turn();
//
// Not thread-safe. EventLoop, which ranks use, runs a Poller in its own thread and guards it with a lock.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "comm/base/unique_fd.h"
#include <maniple/comm/deadline.h>

namespace maniple {

class Poller {
 public:
  using Clock = Deadline::Clock;
  /// Identifies a descriptor or timer. Tokens are never reused, so an event of a descriptor that was closed and
  /// reopened as another file cannot reach the wrong callback.
  using Token = std::uint64_t;
  using Timer = Token;  ///< 0: none
  struct Watch {
    Token token;
    int fd;
    std::function<void(std::uint32_t)> ready;
    std::function<void(const std::string&)> failed;
  };

  Poller();

  /// Calls `ready(events)` whenever the descriptor has EPOLLIN/EPOLLOUT/... `ready` may add and remove any descriptor,
  /// including its own. If it throws, the descriptor is removed and `failed` is called with the reason; without
  /// `failed` the exception leaves turn(). Returns false if epoll does not support the descriptor (a regular file).
  bool add(int fd, std::uint32_t events, std::function<void(std::uint32_t)> ready,
           std::function<void(const std::string& why)> failed = {});
  /// Has no effect for a descriptor that was not added.
  void modify(int fd, std::uint32_t events);
  /// Call it before closing the descriptor. Returns the callbacks, for the caller to destroy, or null.
  std::shared_ptr<Watch> remove(int fd);

  Timer call_at(Deadline when, std::function<void()> callback);
  Timer call_after(std::chrono::duration<double> delay, std::function<void()> callback) {
    return call_at(Deadline::after(delay), std::move(callback));
  }
  /// Cancels the timer and sets it to 0.
  void cancel(Timer& timer) { take(std::exchange(timer, 0)); }
  /// Cancels a timer and returns its callback, for the caller to destroy.
  std::function<void()> take(Timer timer);

  /// Waits for the next event and runs the callbacks that are due.
  void turn();

  // ---- The parts of turn(), for EventLoop

  /// The longest time wait() may block, as epoll_wait's timeout.
  int limit_ms() const;
  /// Waits for events. Does not touch state that the functions above use. Returns false on an error.
  bool wait(int limit_ms) noexcept;
  /// Calls `run(token, callback)` for each callback that is due, until it returns false. `run` must call `callback`,
  /// and may release a lock meanwhile, because the poller's state is not in use then. Callbacks are destroyed inside
  /// `run`, too.
  template <class Run>
  void run_due(Run&& run);

 private:
  struct Alarm {
    Token token;
    std::function<void()> callback;
  };
  template <class Run>
  bool run_watch(std::shared_ptr<Watch> watch, std::uint32_t events, Run& run);

  UniqueFd epoll_;
  Token next_token_ = 1;
  std::unordered_map<Token, std::shared_ptr<Watch>> watches_;
  std::unordered_map<int, Token> token_of_fd_;
  std::multimap<Deadline, Alarm> alarms_;
  std::array<epoll_event, 64> events_;
  std::size_t event_count_ = 0;
};

/// Text of the exception being handled; never empty.
std::string current_exception_text();

template <class Run>
bool Poller::run_watch(std::shared_ptr<Watch> watch, std::uint32_t events, Run& run) {
  bool threw = false;
  const bool go_on = run(watch->token, [&] {
    try {
      watch->ready(events);
    } catch (...) {
      threw = true;
      if (!watch->failed) throw;
      watch->failed(current_exception_text());
      return;
    }
    watch.reset();
  });
  if (!threw) return go_on;
  // Otherwise the descriptor would be ready again at once, and its callback would throw again.
  if (const auto found = watches_.find(watch->token); found != watches_.end()) remove(found->second->fd);
  return run(watch->token, [&] { watch.reset(); }) && go_on;
}

template <class Run>
void Poller::run_due(Run&& run) {
  const std::size_t count = std::exchange(event_count_, 0);
  for (std::size_t i = 0; i < count; ++i) {
    // Copies, because epoll_event is packed on x86-64 and references to its fields are not allowed.
    const Token token = events_[i].data.u64;
    const std::uint32_t events = events_[i].events;
    const auto found = watches_.find(token);
    if (found == watches_.end()) continue;  // removed by an earlier callback of this round
    // A copy of the pointer, because the callback may remove itself and must outlive the call.
    if (!run_watch(found->second, events, run)) return;
  }
  const auto now = Clock::now();
  while (!alarms_.empty() && alarms_.begin()->first.when() <= now) {
    Alarm alarm = std::move(alarms_.begin()->second);
    alarms_.erase(alarms_.begin());
    const bool go_on = run(alarm.token, [&] {
      const auto callback = std::exchange(alarm.callback, {});
      callback();
    });
    if (!go_on) return;
  }
}

}  // namespace maniple
