// The thread that watches what is enqueued on a device: its end, its deadline, the faults that the engine reports.
#include "group/device_calls.h"

#include <poll.h>
#include <pthread.h>

#include <algorithm>

#include <fmt/format.h>

#include "base/threads.h"
#include "group/group_impl.h"

namespace maniple {
namespace {

constexpr auto kShortestPause = std::chrono::microseconds(20);
constexpr auto kLongestPause = std::chrono::milliseconds(1);

}  // namespace

void DeviceCalls::start_watching() {
  if (watcher_.joinable()) return;
  watcher_ = start_thread("the operations of a group on a GPU", [this] { watch_loop(); });
  ::pthread_setname_np(watcher_.native_handle(), "maniple-device");
}

void DeviceCalls::watch(Pending pending) {
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    start_watching();
    wake = pending_.empty();
    pending_.push_back(std::move(pending));
  }
  if (wake) changed_.notify_all();
}

void DeviceCalls::watch_loop() {
  on_group_thread = true;
  std::chrono::nanoseconds pause = kShortestPause;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const bool to_abort = engine_ && !gave_up_ && group_.abort_signal().raised();  // graphs are not in the list
    if (pending_.empty() && staged_messages_.empty() && !to_abort) {
      changed_.notify_all();  // whoever destroys the group waits for this
      changed_.wait(lock);
      pause = kShortestPause;
      continue;
    }
    const bool awaited =
        std::any_of(pending_.begin(), pending_.end(), [](const Pending& one) { return one.work->waiters.load() != 0; });
    lock.unlock();
    bool moved = false;
    try {
      moved = look();
    } catch (...) {
      await_first_cause();
      give_up(std::current_exception(), group_.context_of("device"));
    }
    lock.lock();
    pause = moved || awaited ? std::chrono::nanoseconds(kShortestPause)
                             : std::min<std::chrono::nanoseconds>(pause * 2, kLongestPause);
    if (!moved && !stopping_) changed_.wait_for(lock, pause);
  }
}

bool DeviceCalls::look() {
  if (group_.abort_signal().raised()) return give_up(group_.abort_signal().cause(), {});
  bool moved = start_staged_messages();
  // What follows in a stream is not done before what precedes; other streams go on.
  std::vector<const void*> busy;
  std::vector<std::list<Pending>::iterator> ended, next;  // they stay where they are: others only add to the list
  std::unique_lock lock(mutex_);
  for (auto it = pending_.begin(); it != pending_.end(); ++it) {
    lock.unlock();
    const DeviceEnd& end = it->work->device;
    if (std::find(busy.begin(), busy.end(), end.stream) == busy.end()) {
      if (runtime_.reached(end.event.get())) {
        ended.push_back(it);
      } else {
        busy.push_back(end.stream);
        next.push_back(it);
      }
    }
    lock.lock();
  }
  lock.unlock();
  // After the events: an operation that an engine could only end, not complete, must not pass for a good one.
  const DeviceFault fault = engine_ ? engine_->fault() : DeviceFault{};
  const bool good = fault.kind == DeviceFault::Kind::none;
  for (const auto it : ended) {
    if (!good && it->recorded && it->context.sequence >= fault.seq) continue;  // give_up sees to it
    retire(*it, it->host && it->host->ended ? it->host->error : nullptr);
    moved = true;
    const std::lock_guard guard(mutex_);
    pending_.erase(it);
  }
  if (good) return std::any_of(next.begin(), next.end(), [this](const auto it) { return is_late(*it); }) || moved;
  ErrorInfo context = group_.context_of("device", fault.seq);
  {
    const std::lock_guard guard(mutex_);
    for (const Pending& pending : pending_) {
      if (!pending.recorded || (fault.seq != 0 && pending.context.sequence != fault.seq)) continue;
      context = pending.context;
      break;
    }
  }
  if (fault.kind == DeviceFault::Kind::mismatch) {
    give_up(std::make_exception_ptr(Mismatch("the ranks called different operations")), context);
  } else {
    await_first_cause();
    give_up(std::make_exception_ptr(SystemError(fmt::format("{}: {}", engine_->name(), fault.reason), 0)), context);
  }
  return true;
}

bool DeviceCalls::is_late(Pending& pending) {
  if (!pending.running && (!pending.started || runtime_.reached(pending.started.get()))) {
    pending.running = true;
    pending.deadline = Deadline::after(pending.limit);
  }
  if (!pending.running || !pending.deadline.expired()) return false;
  const double limit = pending.limit.count();
  std::string reason = fmt::format(
      "timed out after {:.1f} s: this rank's stream has reached the operation, another rank's has not", limit);
  std::vector<int> ranks;
  bool called = true;
  if (engine_) {
    for (const LateRank& late : engine_->late_ranks(pending.context.sequence)) {
      ranks.push_back(group_.facts().topology.members[static_cast<std::size_t>(late.rank)].global_rank);
      called = called && late.called;
    }
  }
  if (!ranks.empty()) {
    const int size = group_.size();
    reason =
        fmt::format("timed out after {:.1f} s: {} of {} ranks arrived, waiting for rank{} {}{}", limit,
                    size - static_cast<int>(ranks.size()), size, ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "),
                    called ? ", whose streams are busy with what they hold before it" : "");
  }
  give_up(std::make_exception_ptr(Timeout(reason, std::move(ranks), limit)), ErrorInfo(pending.context));
  return true;
}

bool DeviceCalls::start_staged_messages() {
  std::vector<StagedMessages> ready;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = staged_messages_.begin(); it != staged_messages_.end();) {
      if (it->copied && !runtime_.reached(it->copied.get())) {
        ++it;
        continue;
      }
      ready.push_back(std::move(*it));
      it = staged_messages_.erase(it);
    }
  }
  for (StagedMessages& batch : ready) {
    for (const auto& message : batch.messages) {
      message->since = Deadline::Clock::now();
      message->deadline = Deadline::after(batch.limit);
    }
    group_.backend().start(batch.messages, true);
  }
  return !ready.empty();
}

void DeviceCalls::retire(Pending& pending, const std::exception_ptr& error) {
  if (pending.recorded) group_.end_on_device(pending.context.sequence, error != nullptr);
  pending.work->finish(error);
}

void DeviceCalls::await_first_cause() {
  constexpr int kDetectorMs = 300;
  pollfd raised{group_.abort_signal().fd(), POLLIN, 0};
  if (group_.size() > 1) ::poll(&raised, 1, kDetectorMs);
}

bool DeviceCalls::give_up(const std::exception_ptr& error, const ErrorInfo& context) {
  std::exception_ptr cause = error;
  if (!group_.abort_signal().raised()) cause = group_.propagate(error, context);
  if (engine_) engine_->abort();
  gave_up_ = true;
  std::vector<StagedMessages> messages;
  {
    const std::lock_guard lock(mutex_);
    messages.swap(staged_messages_);
  }
  for (const StagedMessages& batch : messages) {
    for (const auto& message : batch.messages) {
      message->error = cause;
      message->finished();
    }
  }
  std::list<Pending> failed;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = pending_.begin(); it != pending_.end();) {
      const auto next = std::next(it);
      if (!it->host || it->host->ended) failed.splice(failed.end(), pending_, it);
      it = next;
    }
  }
  for (Pending& pending : failed) {
    const bool own = pending.host && (pending.host->error || runtime_.reached(pending.work->device.event.get()));
    retire(pending, own ? pending.host->error : with_context(pending.context, cause));
  }
  return !failed.empty();
}

}  // namespace maniple
