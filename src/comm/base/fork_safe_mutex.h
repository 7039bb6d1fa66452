// A mutex for process-wide data that children of fork() keep.
#pragma once

#include <mutex>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// fork() waits until no other thread holds it, so a child finds it free and the data whole. In static storage, or
/// never destroyed.
///
///   ForkSafeMutex mutex;
///   const std::lock_guard lock(mutex);
///
/// Hold it for short, and start no process meanwhile: fork() would wait for its own thread. What takes long, and data
/// that a child makes anew, has a std::mutex in a ProcessWide (fork_guard.h).
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
  ForkSafeMutex* next_ = nullptr;  // in the list of all
};

}  // namespace maniple
