// A mutex whose use the compiler checks: Clang's -Wthread-safety reports every access to a member without the mutex
// that guards it. Other compilers ignore the annotations.
//
//   class Total {
//    public:
//     void add(int more) {
//       const MutexLock lock(mutex_);
//       sum_ += more;
//       changed_.notify_all();
//     }
//     void await(int least) {
//       MutexLock lock(mutex_);
//       changed_.wait(lock, [&]() MANIPLE_REQUIRES(mutex_) { return sum_ >= least; });
//     }
//
//    private:
//     void reset() MANIPLE_REQUIRES(mutex_) { sum_ = 0; }  // called with mutex_ held
//
//     Mutex mutex_;
//     CondVar changed_;
//     int sum_ MANIPLE_GUARDED_BY(mutex_) = 0;
//   };
//
// Mutex, MutexLock and CondVar are std::mutex, std::unique_lock and std::condition_variable with annotations, at the
// same cost. A child of fork() may find a Mutex locked by a thread that it does not have; see ForkSafeMutex, and
// ProcessWide in fork_guard.h. It may destroy either, and a CondVar. Clang does not check constructors, destructors or
// local variables, and does not follow a MutexLock into a function: mark a function that unlocks its caller's lock with
// MANIPLE_NO_THREAD_SAFETY_ANALYSIS. Header only, so that plugins, which do not link Maniple, use the same classes.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <type_traits>
#include <utility>

#include "comm/base/fork_guard.h"
#include <maniple/export.h>

#if defined(__clang__)
#define MANIPLE_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define MANIPLE_THREAD_ANNOTATION(x)
#endif

/// On a member: access requires this mutex.
#define MANIPLE_GUARDED_BY(mutex) MANIPLE_THREAD_ANNOTATION(guarded_by(mutex))
/// On a function: its caller must hold the mutex (REQUIRES), or must not hold it (EXCLUDES).
#define MANIPLE_REQUIRES(...) MANIPLE_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define MANIPLE_EXCLUDES(...) MANIPLE_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
/// On a function: it locks or unlocks the mutex, or returns a reference to it.
#define MANIPLE_ACQUIRE(...) MANIPLE_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define MANIPLE_TRY_ACQUIRE(...) MANIPLE_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define MANIPLE_RELEASE(...) MANIPLE_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define MANIPLE_RETURN_CAPABILITY(mutex) MANIPLE_THREAD_ANNOTATION(lock_returned(mutex))
/// On a class: a mutex, or an object that holds one while it lives.
#define MANIPLE_CAPABILITY(name) MANIPLE_THREAD_ANNOTATION(capability(name))
#define MANIPLE_SCOPED_CAPABILITY MANIPLE_THREAD_ANNOTATION(scoped_lockable)
/// On a function that Clang cannot analyse; a comment says why.
#define MANIPLE_NO_THREAD_SAFETY_ANALYSIS MANIPLE_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace MANIPLE_API maniple {

class MANIPLE_CAPABILITY("mutex") Mutex {
 public:
  constexpr Mutex() noexcept = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() MANIPLE_ACQUIRE() { native_.lock(); }
  void unlock() MANIPLE_RELEASE() { native_.unlock(); }
  bool try_lock() MANIPLE_TRY_ACQUIRE(true) { return native_.try_lock(); }

 private:
  friend class MutexLock;
  std::mutex native_;
};

/// A mutex for process-wide data that stays valid in children of fork(): fork() waits until no other thread holds it,
/// so a child finds it free and the data consistent. Must be in static storage or never destroyed.
///
/// Hold it briefly, and never start a process while holding it: fork() would deadlock with its own thread. For long
/// critical sections, or data that a child creates anew, use a Mutex in a ProcessWide (fork_guard.h).
class ForkSafeMutex : public Mutex {
 public:
  ForkSafeMutex() {
    [[maybe_unused]] static const int watched = ::pthread_atfork(&lock_all, &unlock_all, &unlock_all);
    next_ = all_.load(std::memory_order_relaxed);
    while (!all_.compare_exchange_weak(next_, this, std::memory_order_acq_rel)) {
    }
  }

 private:
  static void lock_all() MANIPLE_NO_THREAD_SAFETY_ANALYSIS {  // a list, whose length Clang does not know
    ForkSafeMutex* const first = all_.load(std::memory_order_acquire);
    for (ForkSafeMutex* one = first; one != nullptr; one = one->next_) one->lock();
    held_ = first;
  }
  static void unlock_all() MANIPLE_NO_THREAD_SAFETY_ANALYSIS {
    ForkSafeMutex* next = nullptr;
    for (ForkSafeMutex* one = held_; one != nullptr; one = next) {
      next = one->next_;
      one->unlock();
    }
  }

  static inline constinit std::atomic<ForkSafeMutex*> all_{nullptr};
  static inline constinit ForkSafeMutex* held_ = nullptr;  // `all_` when fork() locked them; written with all held
  ForkSafeMutex* next_ = nullptr;
};
static_assert(std::is_trivially_destructible_v<ForkSafeMutex>, "the list of all keeps it until the process ends");

/// Holds a Mutex while it lives, except between unlock() and lock().
class MANIPLE_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) MANIPLE_ACQUIRE(mutex) : native_(mutex.native_) {}
  /// For a mutex that the calling thread already locked with try_lock().
  MutexLock(Mutex& mutex, std::adopt_lock_t adopt) MANIPLE_REQUIRES(mutex) : native_(mutex.native_, adopt) {}
  ~MutexLock() MANIPLE_RELEASE() {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() MANIPLE_RELEASE() { native_.unlock(); }
  void lock() MANIPLE_ACQUIRE() { native_.lock(); }

 private:
  friend class CondVar;
  std::unique_lock<std::mutex> native_;
};

/// A wait releases the lock and holds it again on return. Predicates are called with the lock held. A child of fork()
/// leaves the standard one undestroyed: its destructor waits until all waiters have left, and those that are threads of
/// the parent never leave the child's copy.
class CondVar {
 public:
  CondVar() : native_() {}
  ~CondVar() {
    if (guard_.owned()) native_.~condition_variable();
  }
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  void notify_one() noexcept { native_.notify_one(); }
  void notify_all() noexcept { native_.notify_all(); }

  void wait(MutexLock& lock) { native_.wait(lock.native_); }
  template <class Predicate>
  void wait(MutexLock& lock, Predicate predicate) {
    native_.wait(lock.native_, std::move(predicate));
  }
  template <class TimePoint>
  std::cv_status wait_until(MutexLock& lock, const TimePoint& when) {
    return native_.wait_until(lock.native_, when);
  }
  /// False if `when` passed and the predicate is still false.
  template <class TimePoint, class Predicate>
  bool wait_until(MutexLock& lock, const TimePoint& when, Predicate predicate) {
    return native_.wait_until(lock.native_, when, std::move(predicate));
  }
  template <class Duration>
  std::cv_status wait_for(MutexLock& lock, const Duration& time) {
    return native_.wait_for(lock.native_, time);
  }
  template <class Duration, class Predicate>
  bool wait_for(MutexLock& lock, const Duration& time, Predicate predicate) {
    return native_.wait_for(lock.native_, time, std::move(predicate));
  }

 private:
  ForkGuard guard_;
  union {
    std::condition_variable native_;
  };
};

}  // namespace maniple
