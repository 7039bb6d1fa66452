#include "comm/base/threads.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include <gtest/gtest.h>

namespace maniple {
namespace {

std::atomic<bool> exiting{false};

void say_when_exiting(const char* what) {
  exiting.wait(false);
  std::fputs(what, stderr);
}

/// Ends the process by exit(), and lets work that waits for that go on then.
[[noreturn]] void exit_beside(std::function<void()> work) {
  run_apart(std::move(work));
  std::atexit([] {  // comes before what was registered earlier
    exiting = true;
    exiting.notify_all();
  });
  std::exit(0);
}

TEST(RunApart, ExitWaitsForIt) {
  EXPECT_EXIT(exit_beside([] { say_when_exiting("it was done"); }), testing::ExitedWithCode(0), "it was done");
}

TEST(RunApart, ExitWaitsUntilItsCapturesAreDestroyed) {
  EXPECT_EXIT(
      {
        auto held = std::shared_ptr<void>(nullptr, [](void*) { say_when_exiting("it is gone"); });
        exit_beside([held = std::move(held)] {});
      },
      testing::ExitedWithCode(0), "it is gone");
}

}  // namespace
}  // namespace maniple
