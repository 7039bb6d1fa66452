// A mutex for process-wide data that stays valid in children of fork().
#pragma once

#include <mutex>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// fork() waits until no other thread holds the mutex, so a child finds it free and the data consistent. Must be in
/// static storage or never destroyed.
///
///   ForkSafeMutex mutex;
///   const std::lock_guard lock(mutex);
///
/// Hold it briefly, and never start a process while holding it: fork() would deadlock with its own thread. For long
/// critical sections, or data that a child creates anew, use a Mutex in a ProcessWide (fork_guard.h).
class ForkSafeMutex {
 public:
  ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  struct Handlers;
  std::mutex mutex_;
  ForkSafeMutex* next_ = nullptr;  // list of all fork-safe mutexes
};

}  // namespace maniple
