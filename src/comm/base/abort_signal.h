// The first failure of a group on this rank: why it failed, and an event that wakes every thread that waits in the
// group.
//
// Waiting code asks `raised()` (one load) each time before it waits again, or adds `fd()` to its poll set. The first
// cause wins; later ones are dropped. Thread-safe.
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

  /// Keeps the cause if it is the first (then returns true), runs the listeners once.
  bool raise(std::exception_ptr cause);

  /// Readable once raised.
  int fd() const noexcept { return event_.get(); }

  std::exception_ptr cause() const;

  /// Throws the cause itself.
  [[noreturn]] void rethrow() const;
  void check() const {
    if (raised()) [[unlikely]]
      rethrow();
  }

  /// Run in the thread that raises (at once if raised already); must not block, nor call this object's methods other
  /// than raised and cause. Returns a ticket for `forget`, after which the listener is not running and will not run.
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

/// The text of an exception, for messages built from causes.
std::string text_of(const std::exception_ptr& cause);

/// A listener of an AbortSignal for as long as this object lives: also when the constructor of whoever holds it throws.
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
