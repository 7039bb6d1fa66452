#include "comm/net/poller.h"

#include <fcntl.h>
#include <unistd.h>

#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

#include "comm/base/system_error.h"

namespace maniple {
namespace {

using std::chrono::microseconds;
using std::chrono::seconds;

UniqueFd ringing_event() {
  UniqueFd event = new_event();
  const std::uint64_t one = 1;
  EXPECT_EQ(::write(event.get(), &one, sizeof one), ssize_t{sizeof one});
  return event;
}

TEST(Poller, ACallbackMayRemoveItselfAndOthers) {
  Poller poller;
  const UniqueFd first = ringing_event();
  const UniqueFd second = ringing_event();
  int calls = 0;
  const auto remove_both = [&](std::uint32_t events) {
    EXPECT_EQ(events, std::uint32_t{EPOLLIN});
    ++calls;
    poller.remove(first.get());
    poller.remove(second.get());
  };
  EXPECT_TRUE(poller.add(first.get(), EPOLLIN, remove_both));
  EXPECT_TRUE(poller.add(second.get(), EPOLLIN, remove_both));
  poller.call_after(seconds(0), [] {});
  poller.turn();
  EXPECT_EQ(calls, 1);
}

TEST(Poller, AnEventOfAClosedDescriptorDoesNotReachItsSuccessor) {
  Poller poller;
  UniqueFd first = ringing_event();
  UniqueFd second = ringing_event();
  int calls = 0;
  int successors = 0;
  // Whichever is first closes the other, and adds another event with the same number, which has not happened.
  const auto replace = [&](UniqueFd& other) {
    ++calls;
    const int number = other.get();
    poller.remove(number);
    other.reset();
    other = new_event();
    ASSERT_EQ(other.get(), number);
    poller.add(number, EPOLLIN, [&](std::uint32_t) { ++successors; });
  };
  poller.add(first.get(), EPOLLIN, [&](std::uint32_t) { replace(second); });
  poller.add(second.get(), EPOLLIN, [&](std::uint32_t) { replace(first); });
  poller.turn();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(successors, 0);
}

TEST(Poller, ModifySilencesAndWakes) {
  Poller poller;
  const UniqueFd event = ringing_event();
  int calls = 0;
  poller.add(event.get(), 0, [&](std::uint32_t) { ++calls; });
  poller.call_after(seconds(0), [] {});
  poller.turn();
  EXPECT_EQ(calls, 0);
  poller.modify(event.get(), EPOLLIN);
  poller.turn();
  EXPECT_EQ(calls, 1);
}

TEST(Poller, UnknownDescriptorsAreIgnored) {
  Poller poller;
  const UniqueFd event = ringing_event();
  poller.modify(event.get(), EPOLLIN);
  EXPECT_EQ(poller.remove(event.get()), nullptr);
}

TEST(Poller, AFileCannotBeWaitedFor) {
  Poller poller;
  const UniqueFd file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(file);
  EXPECT_FALSE(poller.add(file.get(), EPOLLIN, [](std::uint32_t) {}));
  EXPECT_THROW(poller.add(-1, EPOLLIN, [](std::uint32_t) {}), SystemError);
}

TEST(Poller, TimersRunInOrderOfTimeAndAtOnceOnlyIfDue) {
  Poller poller;
  std::vector<int> order;
  const Deadline now = Deadline::after(seconds(0));
  poller.call_at(Deadline::never(), [&] { order.push_back(4); });
  poller.call_at(Deadline(now.when() - microseconds(1)), [&] { order.push_back(2); });
  poller.call_at(Deadline(now.when() - microseconds(2)), [&] { order.push_back(1); });
  Poller::Timer cancelled = poller.call_at(now, [&] { order.push_back(3); });
  EXPECT_NE(cancelled, 0u);
  poller.cancel(cancelled);
  EXPECT_EQ(cancelled, 0u);
  poller.cancel(cancelled);
  EXPECT_EQ(poller.limit_ms(), 0);
  poller.turn();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
  EXPECT_EQ(poller.limit_ms(), -1) << "the only timer left never fires";
}

TEST(Poller, ATimerMayCancelTheNext) {
  Poller poller;
  Poller::Timer second = 0;
  bool ran = false;
  poller.call_after(seconds(0), [&] { poller.cancel(second); });
  second = poller.call_after(seconds(0), [&] { ran = true; });
  poller.turn();
  EXPECT_FALSE(ran);
}

TEST(Poller, ACallbackThatThrowsFailsItsOwnerAlone) {
  Poller poller;
  const UniqueFd bad = ringing_event();
  const UniqueFd odd = ringing_event();
  const UniqueFd good = ringing_event();
  std::vector<std::string> failures;
  int calls = 0;
  const auto failed = [&](const std::string& why) { failures.push_back(why); };
  poller.add(bad.get(), EPOLLIN, [](std::uint32_t) { throw std::runtime_error("out of luck"); }, failed);
  poller.add(
      odd.get(), EPOLLIN,
      [&](std::uint32_t) {
        poller.remove(odd.get());  // before it throws
        throw 7;
      },
      failed);
  poller.add(good.get(), EPOLLIN, [&](std::uint32_t) { ++calls; });
  poller.turn();
  poller.turn();
  EXPECT_EQ(failures, (std::vector<std::string>{"out of luck", "an exception of unknown type"}));
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(poller.remove(bad.get()), nullptr) << "it is no longer watched";
}

TEST(Poller, WithoutAFailureCallbackTheExceptionLeavesTurn) {
  Poller poller;
  const UniqueFd event = ringing_event();
  poller.add(event.get(), EPOLLIN, [](std::uint32_t) { throw std::runtime_error("out of luck"); });
  EXPECT_THROW(poller.turn(), std::runtime_error);
  poller.remove(event.get());
  poller.call_after(seconds(0), [] { throw std::runtime_error("timer"); });
  EXPECT_THROW(poller.turn(), std::runtime_error);
}

TEST(Poller, CallbacksAreDestroyedInsideRun) {
  Poller poller;
  const UniqueFd event = ringing_event();
  bool inside = false;
  int destroyed = 0;
  const auto guard = [&] {
    return std::shared_ptr<void>(nullptr, [&](void*) {
      EXPECT_TRUE(inside);
      ++destroyed;
    });
  };
  const auto run = [&](Poller::Token, const auto& callback) {
    inside = true;
    callback();
    inside = false;
    return true;
  };
  poller.call_after(seconds(0), [held = guard()] {});
  poller.add(event.get(), EPOLLIN, [&, held = guard()](std::uint32_t) { poller.remove(event.get()); });
  poller.wait(poller.limit_ms());
  poller.run_due(run);
  EXPECT_EQ(destroyed, 2);
  poller.add(event.get(), EPOLLIN, [held = guard()](std::uint32_t) { throw 7; }, [](const std::string&) {});
  poller.wait(poller.limit_ms());
  poller.run_due(run);
  EXPECT_EQ(destroyed, 3);
}

}  // namespace
}  // namespace maniple
