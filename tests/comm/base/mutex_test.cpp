#include "comm/base/mutex.h"

#include <chrono>
#include <thread>

#include <gtest/gtest.h>

namespace maniple {
namespace {

/// Whether another thread finds it unlocked.
bool is_free(Mutex& mutex) {
  bool free = false;
  std::thread([&] {
    if (!mutex.try_lock()) return;
    free = true;
    mutex.unlock();
  }).join();
  return free;
}

/// A number that threads count up and wait for.
class Counter {
 public:
  void add() {
    const MutexLock lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  void await(int count) {
    MutexLock lock(mutex_);
    changed_.wait(lock, [&]() MANIPLE_REQUIRES(mutex_) { return count_ >= count; });
  }
  bool await_until(int count, std::chrono::steady_clock::time_point when) {
    MutexLock lock(mutex_);
    return changed_.wait_until(lock, when, [&]() MANIPLE_REQUIRES(mutex_) { return count_ >= count; });
  }
  bool await_for(int count, std::chrono::milliseconds time) {
    MutexLock lock(mutex_);
    while (count_ < count) {
      if (changed_.wait_for(lock, time) == std::cv_status::timeout) return count_ >= count;
    }
    return true;
  }
  Mutex& mutex() MANIPLE_RETURN_CAPABILITY(mutex_) { return mutex_; }

 private:
  Mutex mutex_;
  CondVar changed_;
  int count_ MANIPLE_GUARDED_BY(mutex_) = 0;
};

TEST(Mutex, IsHeldWhileItsLockLives) {
  Mutex mutex;
  {
    const MutexLock lock(mutex);
    EXPECT_FALSE(is_free(mutex));
  }
  EXPECT_TRUE(is_free(mutex));
}

TEST(Mutex, ALockMayBeReleasedForAWhile) {
  Mutex mutex;
  {
    MutexLock lock(mutex);
    lock.unlock();
    EXPECT_TRUE(is_free(mutex));
    lock.lock();
    EXPECT_FALSE(is_free(mutex));
  }
  EXPECT_TRUE(is_free(mutex));
  MutexLock lock(mutex);
  lock.unlock();  // not unlocked once more by the destructor
}

TEST(Mutex, ALockTakesOverWhatTryLockHasLocked) {
  Mutex mutex;
  if (!mutex.try_lock()) FAIL();  // ASSERT_TRUE hides the result from Clang
  {
    const MutexLock lock(mutex, std::adopt_lock);
    EXPECT_FALSE(is_free(mutex));
  }
  EXPECT_TRUE(is_free(mutex));
}

TEST(CondVar, WaitsForAPredicate) {
  Counter counter;
  std::thread adding([&] {
    for (int i = 0; i < 3; ++i) counter.add();
  });
  counter.await(3);
  EXPECT_TRUE(counter.await_until(3, std::chrono::steady_clock::now()));
  adding.join();
  EXPECT_TRUE(is_free(counter.mutex()));
}

TEST(CondVar, ReportsATimeout) {
  Counter counter;
  EXPECT_FALSE(counter.await_until(1, std::chrono::steady_clock::now()));
  EXPECT_FALSE(counter.await_for(1, std::chrono::milliseconds(1)));
  counter.add();
  EXPECT_TRUE(counter.await_for(1, std::chrono::milliseconds(1)));
  EXPECT_TRUE(is_free(counter.mutex()));
}

}  // namespace
}  // namespace maniple
