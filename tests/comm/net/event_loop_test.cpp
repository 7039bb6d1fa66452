#include "comm/net/event_loop.h"

#include <sys/eventfd.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/base/unique_fd.h"

namespace maniple {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

UniqueFd make_event() { return UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }
void signal(const UniqueFd& event) {
  const std::uint64_t one = 1;
  ASSERT_EQ(::write(event.get(), &one, sizeof(one)), ssize_t{sizeof(one)});
}

TEST(EventLoop, CallsBackInItsThread) {
  EventLoop loop("test");
  const UniqueFd event = make_event();
  std::promise<bool> called;
  loop.add(event.get(), EPOLLIN, [&](std::uint32_t) {
    loop.remove(event.get());
    called.set_value(loop.inside());
  });
  signal(event);
  EXPECT_TRUE(called.get_future().get());
  EXPECT_FALSE(loop.inside());
}

TEST(EventLoop, AfterRemoveTheCallbackIsNotRunning) {
  EventLoop loop("test");
  const UniqueFd event = make_event();
  for (int i = 0; i < 200; ++i) {
    std::atomic<bool> alive{true};
    std::atomic<int> bad{0};
    loop.add(event.get(), EPOLLIN, [&](std::uint32_t) {
      if (!alive) ++bad;
      std::this_thread::yield();
      if (!alive) ++bad;
    });
    signal(event);
    loop.remove(event.get());
    alive = false;
    EXPECT_EQ(bad, 0);
  }
}

TEST(EventLoop, ModifySilencesAndWakes) {
  EventLoop loop("test");
  const UniqueFd event = make_event();
  signal(event);
  std::promise<void> called;
  loop.add(event.get(), 0, [&](std::uint32_t) {
    loop.remove(event.get());
    called.set_value();
  });
  auto future = called.get_future();
  EXPECT_EQ(future.wait_for(milliseconds(20)), std::future_status::timeout);
  loop.modify(event.get(), EPOLLIN);
  future.get();
}

TEST(EventLoop, TimersRunInOrderOfTime) {
  EventLoop loop("test");
  std::vector<int> order;
  std::promise<void> done;
  loop.call_at(Deadline::after(milliseconds(500)), [&] {
    order.push_back(2);
    done.set_value();
  });
  loop.call_at(Deadline::after(milliseconds(5)), [&] { order.push_back(1); });
  done.get_future().get();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST(EventLoop, CancelledTimersDoNotRun) {
  EventLoop loop("test");
  std::atomic<int> runs{0};
  for (int i = 0; i < 100; ++i) {
    const auto timer = loop.call_at(Deadline::after(std::chrono::microseconds(i * 20)), [&] { ++runs; });
    loop.cancel(timer);
    const int before = runs;
    loop.post_and_wait([] {});
    EXPECT_EQ(runs, before);
  }
}

TEST(EventLoop, PostedWorkIsRunEvenWhenStopping) {
  std::atomic<int> runs{0};
  {
    EventLoop loop("test");
    for (int i = 0; i < 1000; ++i) loop.post([&] { ++runs; });
  }
  EXPECT_EQ(runs, 1000);
}

TEST(EventLoop, PostAndWaitInsideRunsInline) {
  EventLoop loop("test");
  int depth = 0;
  loop.post_and_wait([&] { loop.post_and_wait([&] { depth = 2; }); });
  EXPECT_EQ(depth, 2);
}

TEST(EventLoop, TheLastOwnerMayBeACallback) {
  auto loop = std::make_shared<EventLoop>("test");
  std::promise<void> released;
  EventLoop* raw = loop.get();
  raw->post([owner = std::move(loop), &released]() mutable {
    owner.reset();
    released.set_value();
  });
  released.get_future().get();
}

TEST(EventLoop, SharedIsOneAndEndsWithItsOwners) {
  std::weak_ptr<EventLoop> watched;
  {
    const auto first = EventLoop::shared();
    EXPECT_EQ(first, EventLoop::shared());
    watched = first;
  }
  EXPECT_TRUE(watched.expired());
  EventLoop::shared()->post_and_wait([] {});
}

TEST(EventLoop, ManyThreadsAddAndRemove) {
  EventLoop loop("test");
  std::atomic<int> calls{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        const UniqueFd event = make_event();
        std::promise<void> called;
        std::atomic<bool> first{true};
        loop.add(event.get(), EPOLLIN, [&](std::uint32_t) {
          ++calls;
          if (first.exchange(false)) called.set_value();
        });
        signal(event);
        called.get_future().get();
        loop.remove(event.get());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_GE(calls, 800);
}

TEST(EventLoop, ACallbackThatThrowsFailsItsOwnerAlone) {
  EventLoop loop("test");
  const UniqueFd bad = make_event();
  const UniqueFd unheard = make_event();
  const UniqueFd good = make_event();
  std::promise<std::string> failed;
  std::atomic<int> calls{0};
  loop.add(
      bad.get(), EPOLLIN,
      [&](std::uint32_t) {
        ++calls;
        throw std::runtime_error("out of luck");
      },
      [&](const std::string& why) { failed.set_value(why); });  // called twice, it would throw
  loop.add(unheard.get(), EPOLLIN, [&](std::uint32_t) { throw 7; });
  signal(bad);
  signal(unheard);
  EXPECT_EQ(failed.get_future().get(), "out of luck");
  loop.post([] { throw std::runtime_error("posted"); });
  loop.call_at(Deadline::after(milliseconds(1)), [] { throw std::runtime_error("timer"); });
  std::promise<void> called;
  loop.add(good.get(), EPOLLIN, [&](std::uint32_t) {
    loop.remove(good.get());
    called.set_value();
  });
  std::promise<void> later;
  loop.call_at(Deadline::after(milliseconds(20)), [&] { later.set_value(); });
  later.get_future().get();
  signal(good);
  called.get_future().get();
  EXPECT_EQ(calls, 1) << "it is no longer watched";
  loop.remove(bad.get());  // as every owner does before it closes
}

TEST(EventLoop, WaitingForWhatThrowsThrows) {
  EventLoop loop("test");
  EXPECT_THROW(loop.post_and_wait([] { throw std::runtime_error("posted"); }), std::runtime_error);
  bool ran = false;
  loop.post_and_wait([&] { ran = true; });
  EXPECT_TRUE(ran);
}

}  // namespace
}  // namespace maniple
