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
// same cost. Clang does not check constructors, destructors or local variables, and does not follow a MutexLock into a
// function: mark a function that unlocks its caller's lock with MANIPLE_NO_THREAD_SAFETY_ANALYSIS. Header only, so that
// plugins, which do not link Maniple, use the same classes.
#pragma once

#include <condition_variable>
#include <mutex>
#include <utility>

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

  /// For waiting on the std::condition_variable of a ForkSafeCondition.
  std::unique_lock<std::mutex>& native() noexcept { return native_; }

 private:
  std::unique_lock<std::mutex> native_;
};

/// A wait releases the lock and holds it again on return. Predicates are called with the lock held.
class CondVar {
 public:
  CondVar() = default;
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  void notify_one() noexcept { native_.notify_one(); }
  void notify_all() noexcept { native_.notify_all(); }

  void wait(MutexLock& lock) { native_.wait(lock.native()); }
  template <class Predicate>
  void wait(MutexLock& lock, Predicate predicate) {
    native_.wait(lock.native(), std::move(predicate));
  }
  template <class TimePoint>
  std::cv_status wait_until(MutexLock& lock, const TimePoint& when) {
    return native_.wait_until(lock.native(), when);
  }
  /// False if `when` passed and the predicate is still false.
  template <class TimePoint, class Predicate>
  bool wait_until(MutexLock& lock, const TimePoint& when, Predicate predicate) {
    return native_.wait_until(lock.native(), when, std::move(predicate));
  }
  template <class Duration>
  std::cv_status wait_for(MutexLock& lock, const Duration& time) {
    return native_.wait_for(lock.native(), time);
  }
  template <class Duration, class Predicate>
  bool wait_for(MutexLock& lock, const Duration& time, Predicate predicate) {
    return native_.wait_for(lock.native(), time, std::move(predicate));
  }

 private:
  std::condition_variable native_;
};

}  // namespace maniple
