// The watcher of enqueued operations, with events that the test sets by hand: no group, no device.
#include "comm/backend/device/stream_watcher.h"

#include <future>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "comm/base/error_codec.h"

namespace maniple {
namespace {

using Event = std::atomic<bool>;

struct ManualRuntime final : DeviceRuntime {
  int device_count() noexcept override { return 1; }
  std::string device_id(int) override { return "manual"; }
  std::string describe(int) override { return "manual"; }
  DeviceStream make_stream(int device) override { return {device, nullptr}; }
  void free_stream(DeviceStream) noexcept override {}
  bool is_capturing(DeviceStream) override { return false; }
  DeviceEvent make_event(int device) override { return {device, new Event(false)}; }
  void free_event(DeviceEvent event) noexcept override { delete static_cast<Event*>(event.handle); }
  void record(DeviceEvent, DeviceStream) override {}
  void wait(DeviceStream, DeviceEvent) override {}
  bool reached(DeviceEvent event) override { return static_cast<Event*>(event.handle)->load(); }
  std::byte* make_memory(int, std::size_t) override { return nullptr; }
  void free_memory(int, std::byte*) noexcept override {}
  std::byte* make_pinned(int, std::size_t) override { return nullptr; }
  void free_pinned(int, std::byte*) noexcept override {}
  void copy(void*, const void*, std::size_t, DeviceStream) override {}
  void wait_for_bits(DeviceStream, const std::uint32_t*, std::uint32_t) override {}
};

struct ManualEngine final : DevicePlugin {
  std::string_view name() const noexcept override { return "manual"; }
  bool can(const Operation&) const noexcept override { return true; }
  bool enqueue(const Operation&, void*) override { return false; }
  void begin_batch() override {}
  void end_batch(void*) override {}
  bool has_messages() const noexcept override { return false; }
  void enqueue_messages(std::span<const DeviceMessage>, void*) override {}
  bool can_capture() const noexcept override { return false; }
  RegisteredMemory allocate(std::span<const std::size_t>, std::uint64_t, Deadline) override { return {}; }
  DeviceFault fault() noexcept override {
    return faulty ? DeviceFault{DeviceFault::Kind::failed, "it broke", 0} : DeviceFault{};
  }
  Waits waits() noexcept override { return waiting ? Waits::yes : Waits::no; }
  std::vector<LateRank> late_ranks(std::uint64_t) noexcept override { return {{1, true}}; }
  void abort() noexcept override { aborted = true; }
  std::atomic<bool> faulty{false}, waiting{false}, aborted{false};
};

/// Raises the abort signal for the first failure, as a group does.
struct Observer final : StreamObserver {
  explicit Observer(AbortSignal& abort) : signal(abort) {}
  void ended(std::uint64_t seq, bool failed) noexcept override {
    const MutexLock lock(mutex);
    ends.emplace_back(seq, failed);
  }
  std::exception_ptr failed(const std::exception_ptr& error, const ErrorInfo& context) override {
    signal.raise(with_context(context, error));
    return error;
  }
  int left_before(std::uint64_t seq) const override { return seq > last_of_leaver ? 3 : -1; }
  void compare_calls(std::uint64_t) override {}
  std::vector<std::pair<std::uint64_t, bool>> all() {
    const MutexLock lock(mutex);
    return ends;
  }
  AbortSignal& signal;
  std::atomic<std::uint64_t> last_of_leaver{1000};
  Mutex mutex;
  std::vector<std::pair<std::uint64_t, bool>> ends;
};

class Watched : public testing::Test {
 protected:
  Watched() {
    StreamWatcher::Options options;
    options.runtime = &runtime;
    options.abort = &signal;
    options.observer = &observer;
    options.context.group = "world";
    options.global_ranks = {4, 7};
    watcher.emplace(std::move(options));
  }

  std::shared_ptr<const DeviceEvent> event() {
    return {new DeviceEvent(runtime.make_event(0)), [this](const DeviceEvent* it) {
              runtime.free_event(*it);
              delete it;
            }};
  }
  static void reach(const std::shared_ptr<const DeviceEvent>& event) { *static_cast<Event*>(event->handle) = true; }

  Work add(std::uint64_t seq, const std::shared_ptr<const DeviceEvent>& end, Seconds limit = Seconds::max(),
           bool reported = false) {
    StreamOperation operation;
    operation.work = std::make_shared<detail::WorkState>();
    operation.work->device = {&runtime, end, {}, false, watcher->watch()};
    operation.limit = limit;
    operation.reported = reported;
    operation.context = watcher->context_of("all_reduce", seq);
    operation.recorded = true;
    Work work(operation.work);
    watcher->add(std::move(operation), watcher->begin({}));
    return work;
  }
  static ErrorInfo error_of(const Work& work) {
    try {
      work.synchronize();
    } catch (const Error& error) {
      return error.info();
    }
    ADD_FAILURE() << "the operation succeeded";
    return {};
  }

  ManualRuntime runtime;
  ManualEngine engine;
  AbortSignal signal;
  Observer observer{signal};
  std::optional<StreamWatcher> watcher;
};

TEST_F(Watched, OperationsEndInStreamOrder) {
  const auto one = event(), two = event(), three = event();
  const Work first = add(1, one), second = add(2, two), third = add(3, three);
  reach(two);
  reach(one);
  second.synchronize();
  EXPECT_TRUE(first.done());
  EXPECT_FALSE(third.done());
  EXPECT_EQ(observer.all(), (std::vector<std::pair<std::uint64_t, bool>>{{1, false}, {2, false}}));
  reach(three);
  third.synchronize();
}

TEST_F(Watched, AnOperationThatIsNotRecordedIsNotReported) {
  const auto end = event();
  StreamOperation operation;
  operation.work = std::make_shared<detail::WorkState>();
  operation.work->device = {&runtime, end, {}, false, watcher->watch()};
  operation.limit = Seconds::max();
  const Work work(operation.work);
  watcher->add(std::move(operation), watcher->begin({}));
  reach(end);
  work.synchronize();
  EXPECT_TRUE(observer.all().empty());
}

TEST_F(Watched, AnOperationInAGraphIsDoneAtOnce) {
  StreamOperation operation;
  operation.work = std::make_shared<detail::WorkState>();
  operation.work->device = {&runtime, event(), {}, true, watcher->watch()};
  operation.context = watcher->context_of("all_reduce", 8);
  operation.recorded = true;
  const Work work(operation.work);
  watcher->add(std::move(operation), watcher->begin({}));
  EXPECT_TRUE(work.done());
  EXPECT_EQ(observer.all(), (std::vector<std::pair<std::uint64_t, bool>>{{8, false}}));
}

TEST_F(Watched, ALateOperationNamesTheLateRanksAndAbortsTheEngine) {
  watcher->watch_engine(engine);
  engine.waiting = true;
  const auto end = event();
  const Work late = add(5, end, std::chrono::milliseconds(20), /*reported=*/true);
  const Work behind = add(6, event());
  const ErrorInfo error = error_of(late);
  EXPECT_EQ(error.kind, ErrorKind::timeout);
  EXPECT_EQ(error.ranks, std::vector<int>{7});
  EXPECT_EQ(error.sequence, 5U);
  EXPECT_NE(error.reason.find("1 of 2 ranks arrived, waiting for rank 7"), std::string::npos) << error.reason;
  EXPECT_EQ(error_of(behind).sequence, 6U);
  EXPECT_TRUE(engine.aborted);
  EXPECT_TRUE(signal.raised());
}

TEST_F(Watched, AFaultOfTheEngineEndsAllOperations) {
  watcher->watch_engine(engine);
  const Work work = add(9, event());
  engine.faulty = true;
  const ErrorInfo error = error_of(work);
  EXPECT_EQ(error.kind, ErrorKind::system);
  EXPECT_NE(error.reason.find("manual: it broke"), std::string::npos) << error.reason;
  EXPECT_TRUE(engine.aborted);
}

TEST_F(Watched, ARankThatLeftIsNamed) {
  observer.last_of_leaver = 4;
  const auto end = event();
  const Work before = add(4, end);
  const Work after = add(5, event());
  reach(end);
  before.synchronize();
  const ErrorInfo error = error_of(after);
  EXPECT_EQ(error.kind, ErrorKind::peer_lost);
  EXPECT_EQ(error.loss, LossKind::left);
  EXPECT_EQ(error.ranks, std::vector<int>{3});
}

TEST_F(Watched, TheAbortSignalEndsOperationsExceptUnendedHostParts) {
  StreamOperation operation;
  operation.work = std::make_shared<detail::WorkState>();
  operation.work->device = {&runtime, event(), {}, false, watcher->watch()};
  operation.limit = Seconds::max();
  operation.host = std::make_shared<HostEnd>();
  const auto host = operation.host;
  const Work staged(operation.work);
  watcher->add(std::move(operation), watcher->begin({}));
  const Work other = add(2, event());
  signal.raise(std::make_exception_ptr(Aborted("enough")));
  EXPECT_EQ(error_of(other).kind, ErrorKind::aborted);
  EXPECT_FALSE(staged.done());
  host->end(std::make_exception_ptr(Timeout("its own error")));
  EXPECT_EQ(error_of(staged).kind, ErrorKind::timeout);
}

TEST_F(Watched, CallsComeAfterTheirEventsOrWithTheError) {
  const auto first = event(), second = event();
  std::promise<bool> good, bad;
  watcher->call_after({first}, {}, [&](const std::exception_ptr& error) { good.set_value(error == nullptr); });
  watcher->call_after({second}, {}, [&](const std::exception_ptr& error) { bad.set_value(error != nullptr); });
  reach(first);
  EXPECT_TRUE(good.get_future().get());
  signal.raise(std::make_exception_ptr(Aborted("enough")));
  EXPECT_TRUE(bad.get_future().get());
}

TEST_F(Watched, DrainWaitsForOperationsAndSends) {
  const auto end = event(), copied = event();
  const auto send = std::make_shared<HostEnd>();
  const Work work = add(1, end);
  watcher->call_after({copied}, {send}, [&](const std::exception_ptr&) { send->end(nullptr); });
  auto drained = std::async(std::launch::async, [&] { return watcher->drain([] { return false; }); });
  reach(end);
  work.synchronize();
  EXPECT_NE(drained.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  reach(copied);
  EXPECT_TRUE(drained.get());
}

TEST_F(Watched, DrainGivesUpOnceItIsPointless) {
  add(1, event());
  EXPECT_FALSE(watcher->drain([] { return true; }));
}

TEST_F(Watched, OperationsThatAreLeftFailWithTheWatcher) {
  const Work work = add(1, event());
  watcher.reset();
  EXPECT_EQ(error_of(work).kind, ErrorKind::aborted);
}

}  // namespace
}  // namespace maniple
