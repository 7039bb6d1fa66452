#include <maniple/comm/work.h>

#include "comm/backend/work_state.h"
#include "comm/base/check.h"

namespace maniple {
namespace {

class WaiterCount {
 public:
  explicit WaiterCount(detail::WorkState& state) : state_(state) {
    ++state_.waiters;
    if (!state_.device.watch) return;
    count(1);
    state_.device.watch->changed.notify_all();
  }
  ~WaiterCount() {
    --state_.waiters;
    if (state_.device.watch) count(-1);
  }
  WaiterCount(const WaiterCount&) = delete;
  WaiterCount& operator=(const WaiterCount&) = delete;

 private:
  void count(int change) {
    const MutexLock lock(state_.device.watch->mutex);
    state_.device.watch->waiting += change;
  }
  detail::WorkState& state_;
};

}  // namespace

detail::WorkState* detail::WorkState::make_done() {
  auto* done = new WorkState;
  done->finish(nullptr);
  return done;
}

void detail::WorkState::finish(std::exception_ptr cause) {
  std::vector<std::function<void()>> next;
  {
    const MutexLock lock(mutex);
    error = std::move(cause);
    done.store(true, std::memory_order_release);
    next = std::move(follow);
  }
  changed.notify_all();
  for (const auto& callback : next) callback();
}

void detail::WorkState::require_owned() const {
  if (!guard.owned()) throw Aborted("a child of fork() cannot wait for what its parent started");
}

std::atomic<CurrentStream> current_stream{nullptr};

bool Work::done() const {
  MANIPLE_REQUIRE(state_ != nullptr, "this Work is a handle to nothing");
  if (state_->done.load(std::memory_order_acquire)) return true;
  // Poll directly: the watching thread polls less often than callers do.
  const DeviceEnd& device = state_->device;
  return device.runtime != nullptr && !device.captured && device.is_reached();
}

void Work::wait() const {
  MANIPLE_REQUIRE(state_ != nullptr, "this Work is a handle to nothing");
  const DeviceEnd& device = state_->device;
  if (device.runtime == nullptr) return synchronize();
  const CurrentStream hook = current_stream.load(std::memory_order_acquire);
  order_after(*this, hook != nullptr ? hook(device.stream.device) : device.stream.handle);
}

void order_after(const Work& work, void* handle) {
  const detail::WorkState& state = *work.state();
  const DeviceEnd& device = state.device;
  const DeviceStream stream{device.stream.device, handle};
  if (state.done.load(std::memory_order_acquire) && !device.captured) {
    if (state.error) std::rethrow_exception(state.error);
    return;
  }
  if (device.arrival && !device.arrival->is_enqueued()) {
    if (device.arrival->enqueue(stream)) return;
    if (!device.arrival->is_enqueued()) return work.synchronize();  // it is failing now
  }
  if (stream != device.stream) device.runtime->wait(stream, *device.event);
}

bool DeviceArrival::enqueue(DeviceStream stream) {
  const MutexLock lock(mutex_);
  if (state_.load(std::memory_order_relaxed) != State::open) return false;
  DeviceRuntime& runtime = *copy_.runtime;
  runtime.wait(stream, *copy_.posted);
  runtime.wait_for_bits(stream, copy_.word, 1);
  if (copy_.bytes != 0) runtime.copy(copy_.to, copy_.from, copy_.bytes, stream);
  runtime.record(*copy_.end, stream);
  state_.store(State::enqueued, std::memory_order_release);
  return true;
}

void DeviceArrival::close() noexcept {
  const MutexLock lock(mutex_);
  if (state_.load(std::memory_order_relaxed) == State::open) state_.store(State::closed, std::memory_order_release);
  copy_.memory.reset();
}

void Work::synchronize() const { wait_until(Deadline::never()); }

bool Work::wait_until(Deadline deadline) const {
  MANIPLE_REQUIRE(state_ != nullptr, "this Work is a handle to nothing");
  if (!state_->done.load(std::memory_order_acquire)) {
    state_->require_owned();
    const WaiterCount count(*state_);
    MutexLock lock(state_->mutex);
    const auto is_done = [this] { return state_->done.load(std::memory_order_acquire); };
    if (deadline.is_never()) {
      state_->changed.wait(lock, is_done);
    } else if (!state_->changed.wait_until(lock, deadline.when(), is_done)) {
      return false;
    }
  }
  if (state_->error) std::rethrow_exception(state_->error);
  return true;
}

std::exception_ptr Work::error() const {
  MANIPLE_REQUIRE(state_ != nullptr, "this Work is a handle to nothing");
  return state_->done.load(std::memory_order_acquire) ? state_->error : nullptr;
}

void when_done(const Work& work, std::function<void(const std::exception_ptr& error)> callback) {
  const std::shared_ptr<detail::WorkState>& state = work.state();
  auto run = [state = state.get(), callback = std::move(callback)] { callback(state->error); };
  if (!state->done.load(std::memory_order_acquire)) {
    state->require_owned();
    const MutexLock lock(state->mutex);
    if (!state->done.load(std::memory_order_acquire)) {
      state->follow.push_back(std::move(run));
      return;
    }
  }
  run();
}

Work Work::then(std::function<void()> next) const {
  MANIPLE_REQUIRE(state_ != nullptr, "this Work is a handle to nothing");
  auto following = std::make_shared<detail::WorkState>();
  following->device.watch = state_->device.watch;  // waiting for the continuation is waiting for the operation
  auto run = [state = state_.get(), following, next = std::move(next)] {
    std::exception_ptr error = state->error;
    if (!error) {
      try {
        next();
      } catch (...) {
        error = std::current_exception();
      }
    }
    following->finish(std::move(error));
  };
  if (!state_->done.load(std::memory_order_acquire)) {
    state_->require_owned();
    const MutexLock lock(state_->mutex);
    if (!state_->done.load(std::memory_order_acquire)) {
      state_->follow.push_back(std::move(run));
      return Work(following);
    }
  }
  run();
  return Work(following);
}

}  // namespace maniple
