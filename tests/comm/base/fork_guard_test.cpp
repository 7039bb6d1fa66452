#include "comm/base/fork_guard.h"

#include <sys/wait.h>
#include <unistd.h>

#include <mutex>
#include <thread>

#include "comm/base/mutex.h"
#include "comm/shm/sleeper.h"

namespace maniple {
namespace {

/// The exit code of a child that runs `body`; -1 if it hung.
int run_in_child(int (*body)()) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);  // a hang ends by a signal, which the parent sees
    ::_exit(body());
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

struct Counted {
  std::mutex mutex;
  int number = 0;
};
constinit ProcessWide<Counted> counted;

TEST(ProcessWide, AChildMakesItsOwnWhileAnotherThreadOfItsParentHoldsTheLock) {
  const std::lock_guard lock(counted->mutex);
  counted->number = 1;
  int status = -1;
  std::thread([&status] {
    status = run_in_child([] {
      const std::lock_guard own(counted->mutex);
      return counted->number;
    });
  }).join();
  EXPECT_EQ(status, 0);
  EXPECT_EQ(counted->number, 1);
}

// A pair of numbers that are equal whenever the lock is free.
ForkSafeMutex pair_mutex, other_mutex;
int first_number = 0, second_number = 0;

int numbers_in_child() {
  const std::lock_guard lock(pair_mutex), other(other_mutex);
  return first_number == second_number ? first_number : 100;
}

// Destroying a std::condition_variable waits until its waiters have left.
TEST(CondVar, AChildDestroysItWhileAThreadOfItsParentWaits) {
  static CondVar* changed;
  changed = new CondVar;
  Mutex mutex;
  bool over = false;
  Sleeper waiting([&] {
    MutexLock lock(mutex);
    changed->wait(lock, [&over] { return over; });
  });
  EXPECT_TRUE(waiting.falls_asleep());
  const int status = run_in_child([] {
    delete changed;
    return 3;
  });
  EXPECT_EQ(status, 3);
  {
    const MutexLock lock(mutex);
    over = true;
  }
  changed->notify_all();
  waiting.join();
  delete changed;
}

TEST(ForkSafeMutex, ForkedChildFindsItUnlockedAndTheDataConsistent) {
  pair_mutex.lock();
  first_number = 7;
  int status = -1;
  Sleeper forking([&status] { status = run_in_child(numbers_in_child); });
  EXPECT_TRUE(forking.falls_asleep()) << "fork() waits for the lock";
  second_number = 7;
  pair_mutex.unlock();
  forking.join();
  EXPECT_EQ(status, 7);
  const std::lock_guard lock(pair_mutex), other(other_mutex);  // the parent's are free, too
}

TEST(ForkSafeMutex, GrandchildFindsItUnlocked) {
  EXPECT_EQ(run_in_child([] { return run_in_child([] { return numbers_in_child() == 100 ? 1 : 5; }); }), 5);
}

}  // namespace
}  // namespace maniple
