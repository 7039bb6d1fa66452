// The thread that watches what is enqueued on a device: its end, its deadline, the faults that the engine reports.
#include "group/device_calls.h"

#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "base/threads.h"
#include "group/group_impl.h"

namespace maniple {
namespace {

constexpr auto kSoon = std::chrono::microseconds(20);      // between two looks while a thread of the host waits
constexpr auto kSeldom = std::chrono::microseconds(1000);  // and while none does
constexpr auto kPause = std::chrono::milliseconds(1);
constexpr auto kLeavingTime = std::chrono::seconds(1);  // for what is enqueued when all other ranks have left the group
constexpr int kPausesToAsk = 50;                        // between two questions whether they have

/// Frees registered memory of a device, which may wait for all that the device does: so not in a thread of ours, which the device may be
/// waiting for. (The thread that watches drops what an operation kept.)
void free_registered(void* memory) {
  auto* const registered = static_cast<RegisteredMemory*>(memory);
  if (!on_group_thread) {
    delete registered;
    return;
  }
  // At exit before the runtime of the device is taken down, which has begun earlier than this.
  static const bool kAwaited = (await_apart_at_exit(), true);
  (void)kAwaited;
  run_apart([registered] { delete registered; });  // no thread to be had: the memory stays
}

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
    pending.after = ++stamp_;
    pending_.push_back(std::move(pending));
  }
  if (wake) changed_.notify_all();
}

void DeviceCalls::watch_loop() {
  on_group_thread = true;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const bool to_abort = engine_ && !gave_up_ && group_.abort_signal().raised();  // graphs are not in the list
    if (pending_.empty() && staged_messages_.empty() && !to_abort) {
      changed_.notify_all();  // whoever destroys the group waits for this
      changed_.wait(lock);
      continue;
    }
    lock.unlock();
    try {
      look();
    } catch (...) {
      await_first_cause();
      give_up(std::current_exception(), group_.context_of("device"));
    }
    lock.lock();
    if (stopping_) break;
    // Messages start when what they send has been copied, and another rank may be waiting for them.
    const bool soon = watch_->waiting != 0 || !staged_messages_.empty();
    changed_.wait_for(lock, soon ? kSoon : kSeldom);
  }
}

// A stream comes to the ends of operations in the order in which they were recorded: so few events need to be asked.
std::vector<std::list<DeviceCalls::Pending>::iterator> DeviceCalls::take_ended(
    std::vector<std::list<Pending>::iterator>& of_stream) {
  const auto has_ended = [&](std::size_t i) { return runtime_.reached(of_stream[i]->work->device.event.get()); };
  std::size_t ended = 0, busy = of_stream.size();  // the first `ended` have; `busy` and those after it have not
  if (!has_ended(0)) {
    busy = 0;
  } else if (ended = 1; busy > 1 && has_ended(busy - 1)) {
    ended = busy;
  }
  while (ended + 1 < busy) {
    const std::size_t middle = (ended + busy) / 2;
    (has_ended(middle) ? ended : busy) = middle;
  }
  std::vector<std::list<Pending>::iterator> result, rest;
  for (std::size_t i = 0; i < of_stream.size(); ++i) {
    // Calls of several threads may be listed in another order than their ends were recorded.
    const bool known = i < ended && (i + 1 == ended || of_stream[i]->after < of_stream[ended - 1]->before);
    (known || (i < ended && has_ended(i)) ? result : rest).push_back(of_stream[i]);
  }
  of_stream = std::move(rest);
  return result;
}

void DeviceCalls::look() {
  if (group_.abort_signal().raised()) return give_up(group_.abort_signal().cause(), {});
  start_staged_messages();
  std::vector<std::vector<std::list<Pending>::iterator>> streams;  // others only add to the list
  std::vector<std::list<Pending>::iterator> arrivals;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = pending_.begin(); it != pending_.end(); ++it) {
      if (it->work->device.arrival) {
        arrivals.push_back(it);
        continue;
      }
      const auto is_same = [&](const auto& one) { return one.front()->work->device.stream == it->work->device.stream; };
      auto stream = std::find_if(streams.begin(), streams.end(), is_same);
      if (stream == streams.end()) stream = streams.insert(streams.end(), {{}});
      stream->push_back(it);
    }
  }
  std::vector<std::list<Pending>::iterator> ended;
  for (auto& stream : streams) {
    const auto more = take_ended(stream);
    ended.insert(ended.end(), more.begin(), more.end());
  }
  for (const auto it : arrivals) {
    DeviceEnd& end = it->work->device;
    if (it->host->ended) end.arrival->enqueue(end.stream);
    if (end.is_reached()) ended.push_back(it);
  }
  // After the events: an operation that an engine could only end, not complete, must not pass for a good one.
  const DeviceFault fault = engine_ ? engine_->fault() : DeviceFault{};
  const bool good = fault.kind == DeviceFault::Kind::none;
  std::list<Pending> done;  // what it keeps is let go without the lock
  for (const auto it : ended) {
    if (!good && it->recorded && it->context.sequence >= fault.seq) continue;  // give_up sees to it
    retire(*it, it->host && it->host->ended ? it->host->error : nullptr);
    const std::lock_guard guard(mutex_);
    done.splice(done.end(), pending_, it);
  }
  if (good) {
    Pending* oldest = nullptr;  // of those that the engine tells of: it is the one that waits, if any does
    for (const auto& stream : streams) {
      for (const auto it : stream) {
        if (!it->told) continue;
        if (oldest == nullptr || it->context.sequence < oldest->context.sequence) oldest = &*it;
        break;
      }
    }
    // What follows in a stream has not begun before what precedes it has ended; other streams go on.
    for (const auto& stream : streams) {
      if (!stream.empty() && is_left(*stream.front())) return;
      if (!stream.empty() && is_late(*stream.front(), &*stream.front() == oldest)) return;
    }
    return;
  }
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
}

bool DeviceCalls::is_left(const Pending& pending) {
  const int gone = pending.recorded ? group_.left_before(pending.context.sequence) : -1;
  if (gone < 0) return false;
  ErrorInfo info;
  info.ranks = {gone};
  info.origin = gone;
  info.loss = LossKind::left;
  info.reason = fmt::format("rank {} has left the group (it was destroyed there) before this operation", gone);
  give_up(std::make_exception_ptr(PeerLost(std::move(info))), ErrorInfo(pending.context));
  return true;
}

bool DeviceCalls::is_late(Pending& pending, bool oldest) {
  if (!pending.running) {
    pending.running = pending.told      ? oldest && engine_->waits() == DevicePlugin::Waits::yes
                      : pending.started ? runtime_.reached(pending.started.get())
                                        : true;
    pending.deadline = Deadline::after(pending.limit);
    pending.ask = Deadline::after(pending.ask_after);
  }
  // Engines compare operations on the device with each other, if at all. A rank that is in one on the host is another case.
  if (pending.running && pending.recorded && pending.ask.expired()) {
    group_.facts().session->compare_calls(group_.facts().name, pending.context.sequence);
    pending.ask_after = std::min<Seconds>(2 * pending.ask_after, std::chrono::minutes(1));
    pending.ask = Deadline::after(pending.ask_after);
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

void DeviceCalls::start_staged_messages() {
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
}

void DeviceCalls::retire(Pending& pending, const std::exception_ptr& error) {
  if (pending.recorded) group_.end_on_device(pending.context.sequence, error != nullptr);
  if (pending.work->device.arrival) pending.work->device.arrival->close();
  pending.work->finish(error);
}

void DeviceCalls::await_first_cause() {
  constexpr int kDetectorMs = 300;
  pollfd raised{group_.abort_signal().fd(), POLLIN, 0};
  if (group_.size() > 1) ::poll(&raised, 1, kDetectorMs);
}

void DeviceCalls::give_up(const std::exception_ptr& error, const ErrorInfo& context) {
  std::exception_ptr cause = error;
  if (!group_.abort_signal().raised()) {
    cause = group_.propagate(error, context);
    group_.keep_unseen(with_context(context, cause));
  }
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
    const bool own = pending.host && (pending.host->error || pending.work->device.is_reached());
    retire(pending, own ? pending.host->error : with_context(pending.context, cause));
  }
}

RegisteredMemory DeviceCalls::allocate(std::span<const std::size_t> sizes, std::uint64_t number, Deadline deadline) {
  if (!engine_) {
    throw Unsupported(
        fmt::format("allocate: backend {} has no registered memory on a GPU; the backends cuda and nccl have",
                    group_.facts().backend));
  }
  auto* const memory = new RegisteredMemory(engine_->allocate(sizes, number, deadline));
  return {memory->data(), memory->size(), std::shared_ptr<void>(memory, free_registered)};
}

void DeviceCalls::finish() {
  const auto left = [this](std::int64_t more) {  // so many ranks have nothing enqueued any more
    try {
      return group_.store_->add("left", more);
    } catch (const Error&) {
      return std::int64_t{group_.size()};  // the store has gone
    }
  };
  std::unique_lock lock(mutex_);
  std::optional<Deadline> last;  // what waits for ranks that have left is never done
  // A send whose bytes have been copied has ended for its caller; the rank that receives it still needs this one.
  const auto is_busy = [this] { return !pending_.empty() || !staged_messages_.empty() || is_sending(); };
  for (int i = 1; is_busy() && !group_.abort_signal().raised(); ++i) {
    changed_.wait_for(lock, kPause);
    if (last && last->expired()) return;
    if (last || i % kPausesToAsk != 0) continue;
    lock.unlock();
    if (left(0) >= group_.size() - 1) last = Deadline::after(kLeavingTime);
    lock.lock();
  }
  lock.unlock();
  if (group_.size() > 1 && !group_.abort_signal().raised()) left(1);
}

}  // namespace maniple
