// Waits for descriptors and timers in the calling thread: the launcher has no other thread unless there are several
// nodes. (EventLoop, which ranks use, brings a thread of its own.)
#pragma once

#include <sys/epoll.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "base/unique_fd.h"

namespace maniple::launch {

class Poller {
 public:
  using Clock = std::chrono::steady_clock;
  using Timer = std::uint64_t;  ///< 0: none

  Poller();

  /// `ready` may watch and forget any descriptor, its own too. False if the descriptor cannot be waited for (a file).
  bool watch(int fd, std::uint32_t events, std::function<void(std::uint32_t)> ready);
  void modify(int fd, std::uint32_t events);
  void forget(int fd);

  Timer call_after(std::chrono::duration<double> delay, std::function<void()> call);
  /// Forgets the timer and sets it to 0.
  void cancel(Timer& timer);

  /// Waits for the next event and handles what is there.
  void turn();

 private:
  void run_timers();

  struct Entry {
    std::function<void(std::uint32_t)> ready;
    bool gone = false;
  };

  UniqueFd epoll_;
  std::map<int, std::shared_ptr<Entry>> entries_;
  std::map<std::pair<Clock::time_point, Timer>, std::function<void()>> timers_;
  Timer next_timer_ = 1;
};

}  // namespace maniple::launch
