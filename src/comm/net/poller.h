// Waits for descriptors and timers, and runs their callbacks in the thread that waits.
//
//   Poller poller;
//   poller.add(fd, EPOLLIN, [&](std::uint32_t events) { ... });
//   while (!done) poller.turn();
//
// Not thread-safe. EventLoop, which ranks use, runs one in a thread of its own and guards it with a lock.
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
  /// Descriptors and timers are known by tokens that are never used twice, so that an event of a descriptor that was
  /// closed and opened again as something else cannot reach the wrong callback.
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
  /// its own too. If it throws, the descriptor is removed and `failed` is called with the reason; without `failed` the
  /// exception leaves turn(). False if the descriptor cannot be waited for (a file).
  bool add(int fd, std::uint32_t events, std::function<void(std::uint32_t)> ready,
           std::function<void(const std::string& why)> failed = {});
  /// Nothing happens for a descriptor that was not added.
  void modify(int fd, std::uint32_t events);
  /// To be called before the descriptor is closed. Returns the callbacks, for the caller to destroy, or null.
  std::shared_ptr<Watch> remove(int fd);

  Timer call_at(Deadline when, std::function<void()> callback);
  Timer call_after(std::chrono::duration<double> delay, std::function<void()> callback) {
    return call_at(Deadline::after(delay), std::move(callback));
  }
  /// Cancels the timer and sets it to 0.
  void cancel(Timer& timer) { take(std::exchange(timer, 0)); }
  /// Cancels a timer and returns its callback, for the caller to destroy.
  std::function<void()> take(Timer timer);

  /// Waits for the next event and handles what is there.
  void turn();

  // ---- The parts of turn(), for EventLoop

  /// How long wait() may wait, for epoll_wait.
  int limit_ms() const;
  /// Waits for events. Touches nothing that the functions above use. False on an error.
  bool wait(int limit_ms) noexcept;
  /// Calls `run(token, callback)` for each callback that is due, until it returns false. `run` must call `callback`,
  /// and may release a lock meanwhile: nothing of the poller is in use then. Callbacks are destroyed there, too.
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

/// The text of the exception being handled; never empty.
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
  // Left in the poller, a descriptor whose callback throws would be ready again at once.
  if (const auto found = watches_.find(watch->token); found != watches_.end()) remove(found->second->fd);
  return run(watch->token, [&] { watch.reset(); }) && go_on;
}

template <class Run>
void Poller::run_due(Run&& run) {
  const std::size_t count = std::exchange(event_count_, 0);
  for (std::size_t i = 0; i < count; ++i) {
    // Copies: the struct is packed on x86-64, so its fields cannot be referred to.
    const Token token = events_[i].data.u64;
    const std::uint32_t events = events_[i].events;
    const auto found = watches_.find(token);
    if (found == watches_.end()) continue;  // removed by an earlier callback of this round
    // A copy: the callback may remove itself, and must outlive the call.
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
