// The first failure of a group on this rank: its cause, and an event that wakes every thread waiting in the group.
//
// Waiting code checks `raised()` (one load) before each wait, or adds `fd()` to its poll set. The first cause wins;
// later causes are dropped. Thread-safe.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/base/mutex.h"
#include "comm/base/ticks.h"
#include "comm/base/unique_fd.h"
#include <maniple/comm/error.h>

namespace maniple {

class AbortSignal {
 public:
  AbortSignal();

  bool raised() const noexcept { return load_acquire(raised_); }

  /// If no cause is set yet: stores `cause`, runs the listeners once and returns true. Otherwise returns false.
  bool raise(std::exception_ptr cause);

  /// Becomes readable after the listeners have run.
  int fd() const noexcept { return event_.get(); }

  std::exception_ptr cause() const;

  /// Throws the original exception.
  [[noreturn]] void rethrow() const;
  void check() const {
    if (raised()) [[unlikely]]
      rethrow();
  }

  /// Registers a listener. It runs in the thread that raises, or at once if the signal is already raised. It must not
  /// block, and of this object's methods it may call only raised() and cause(). Returns a ticket for `forget`; after
  /// forget() returns, the listener is not running and will not run.
  int on_raise(std::function<void()> listener);
  void forget(int ticket);

 private:
  std::atomic<bool> raised_{false};
  UniqueFd event_;
  mutable Mutex mutex_;
  std::exception_ptr cause_ MANIPLE_GUARDED_BY(mutex_);
  Mutex listeners_mutex_;  // held while listeners run
  std::vector<std::pair<int, std::function<void()>>> listeners_ MANIPLE_GUARDED_BY(listeners_mutex_);
  int next_ticket_ MANIPLE_GUARDED_BY(listeners_mutex_) = 0;
};

/// Exception text, for messages built from causes.
std::string text_of(const std::exception_ptr& cause);

/// Listens to an AbortSignal while this object lives. As a member, it also unregisters when its owner's constructor
/// throws.
class AbortListener {
 public:
  AbortListener(AbortSignal& signal, std::function<void()> listener)
      : signal_(signal), ticket_(signal.on_raise(std::move(listener))) {}
  ~AbortListener() { signal_.forget(ticket_); }
  AbortListener(const AbortListener&) = delete;
  AbortListener& operator=(const AbortListener&) = delete;

 private:
  AbortSignal& signal_;
  int ticket_;
};

}  // namespace maniple
