// The thread that watches enqueued device operations: their ends, their deadlines, the engine's faults.
#include "comm/group/device_calls.h"

#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/error_codec.h"
#include "comm/base/threads.h"
#include "comm/group/group_impl.h"

namespace maniple {
namespace {

constexpr auto kSoon = std::chrono::microseconds(20);      // between polls while a host thread waits
constexpr auto kSeldom = std::chrono::microseconds(1000);  // between polls otherwise
constexpr auto kPause = std::chrono::milliseconds(1);
constexpr auto kLeavingTime = std::chrono::seconds(1);  // for enqueued work after all other ranks have left the group
constexpr int kPausesToAsk = 50;                        // pauses between checks whether they have left

/// Frees registered device memory. That may wait for all work on the device, which may itself wait for a group's
/// thread, so it never happens on such a thread. (The watching thread releases memory that operations kept.)
void free_registered(void* memory) {
  auto* const registered = static_cast<RegisteredMemory*>(memory);
  if (!on_group_thread) {
    delete registered;
    return;
  }
  // At exit this is awaited before the device runtime shuts down, as the runtime was initialised earlier.
  static const bool kAwaited = (await_apart_at_exit(), true);
  (void)kAwaited;
  run_apart([registered] { delete registered; });  // if no thread can be started, the memory leaks
}

}  // namespace

void DeviceCalls::start_watching() {
  if (watcher_.joinable()) return;
  watcher_ = start_thread("the operations of a group on a GPU", [this] { watch_loop(); });
  ::pthread_setname_np(watcher_.native_handle(), "maniple-device");
}

DeviceCalls::Enqueueing DeviceCalls::begin_enqueueing(DeviceStream stream) {
  Enqueueing place;
  {
    const MutexLock lock(watch_->mutex);
    auto& queue = queues_[stream];
    if (!queue) queue = std::make_shared<StreamQueue>();
    place.queue = queue;
  }
  place.lock = std::unique_lock(place.queue->enqueueing);
  return place;
}

void DeviceCalls::watch(Pending pending, Enqueueing to) { add(to.queue->pending, std::move(pending)); }

// Not checked by the analysis: only takes the address; add() locks.
void DeviceCalls::watch_arrival(Pending pending) MANIPLE_NO_THREAD_SAFETY_ANALYSIS {
  add(arrivals_, std::move(pending));
}

void DeviceCalls::add(std::list<Pending>& to, Pending pending) {
  bool wake = false;
  {
    const MutexLock lock(watch_->mutex);
    start_watching();
    wake = is_idle();
    to.push_back(std::move(pending));
  }
  if (wake) changed_->notify_all();
}

bool DeviceCalls::is_idle() const {
  return arrivals_.empty() &&
         std::all_of(queues_.begin(), queues_.end(), [](const auto& one) { return one.second->pending.empty(); });
}

std::vector<std::list<DeviceCalls::Pending>*> DeviceCalls::all_pending() {
  std::vector<std::list<Pending>*> lists = {&arrivals_};
  for (const auto& [stream, queue] : queues_) lists.push_back(&queue->pending);
  return lists;
}

void DeviceCalls::watch_loop() {
  on_group_thread = true;
  MutexLock lock(watch_->mutex);
  while (!stopping_) {
    // Captured operations are not in any list, so idleness alone does not decide.
    const bool to_abort = engine_ && !gave_up_ && group_.abort_signal().raised();
    if (is_idle() && staged_messages_.empty() && !to_abort) {
      changed_->notify_all();  // finish() waits for this
      changed_->wait(lock.native());
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
    // Messages start once their data has been copied, and another rank may be waiting for them.
    const bool soon = watch_->waiting != 0 || !staged_messages_.empty();
    changed_->wait_for(lock.native(), soon ? kSoon : kSeldom);
  }
}

// A stream ends its operations in queue order, so a binary search polls few events.
std::vector<DeviceCalls::Position> DeviceCalls::take_ended(std::vector<Position>& queue) {
  const auto has_ended = [this](const Position& it) { return runtime_.reached(*it->work->device.event); };
  if (!has_ended(queue.front())) return {};
  const auto rest =
      has_ended(queue.back()) ? queue.end() : std::partition_point(queue.begin() + 1, queue.end() - 1, has_ended);
  std::vector<Position> ended(queue.begin(), rest);
  queue.erase(queue.begin(), rest);
  return ended;
}

void DeviceCalls::look() {
  if (group_.abort_signal().raised()) return give_up(group_.abort_signal().cause(), {});
  start_staged_messages();
  std::vector<std::vector<Position>> queues;  // other threads only add to the lists
  std::vector<Position> arrivals;
  const auto positions_in = [](std::list<Pending>& list) {
    std::vector<Position> positions;
    for (auto at = list.begin(); at != list.end(); ++at) positions.push_back({&list, at});
    return positions;
  };
  {
    const MutexLock lock(watch_->mutex);
    // Drops empty queues that no thread is about to add to, as their streams may be gone.
    std::erase_if(queues_, [](const auto& one) { return one.second->pending.empty() && one.second.use_count() == 1; });
    for (const auto& [stream, queue] : queues_) {
      if (!queue->pending.empty()) queues.push_back(positions_in(queue->pending));
    }
    arrivals = positions_in(arrivals_);
  }
  std::vector<Position> ended;
  for (auto& queue : queues) {
    const auto more = take_ended(queue);
    ended.insert(ended.end(), more.begin(), more.end());
  }
  for (const Position& it : arrivals) {
    DeviceEnd& end = it->work->device;
    if (it->host->ended) end.arrival->enqueue(end.stream);
    if (end.is_reached()) ended.push_back(it);
  }
  // Checked after the events: an operation that the engine cancelled must not count as successful.
  const DeviceFault fault = engine_ ? engine_->fault() : DeviceFault{};
  const bool good = fault.kind == DeviceFault::Kind::none;
  std::list<Pending> done;  // destroyed, with the memory it keeps, without the lock
  for (const Position& it : ended) {
    if (!good && it->recorded && it->context.sequence >= fault.seq) continue;  // give_up() retires it
    retire(*it.at, it->host && it->host->ended ? it->host->error : nullptr);
    const MutexLock guard(watch_->mutex);
    done.splice(done.end(), *it.list, it.at);
  }
  if (good) {
    Pending* oldest = nullptr;  // of the operations that the engine reports on: only this one can be waiting
    for (const auto& queue : queues) {
      const auto first = std::find_if(queue.begin(), queue.end(), [](const Position& it) { return it->told; });
      if (first == queue.end()) continue;
      if (oldest == nullptr || (*first)->context.sequence < oldest->context.sequence) oldest = &*first->at;
    }
    // Only the front of each stream's queue can be running.
    for (const auto& queue : queues) {
      if (queue.empty()) continue;
      Pending& front = *queue.front().at;
      if (is_left(front) || is_late(front, &front == oldest)) return;
    }
    return;
  }
  ErrorInfo context = group_.context_of("device", fault.seq);
  {
    const MutexLock guard(watch_->mutex);
    bool found = false;  // the oldest operation, unless the engine names one
    for (const std::list<Pending>* list : all_pending()) {
      for (const Pending& pending : *list) {
        if (!pending.recorded || (fault.seq != 0 && pending.context.sequence != fault.seq)) continue;
        if (found && pending.context.sequence >= context.sequence) continue;
        context = pending.context;
        found = true;
      }
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
                      : pending.started ? runtime_.reached(*pending.started)
                                        : true;
    pending.deadline = Deadline::after(pending.limit);
    pending.ask = Deadline::after(pending.ask_after);
  }
  // Engines compare at most device operations with each other. This also detects a rank in a host operation.
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
    const MutexLock lock(watch_->mutex);
    for (auto it = staged_messages_.begin(); it != staged_messages_.end();) {
      if (!std::all_of(it->copied.begin(), it->copied.end(), [this](const auto& e) { return runtime_.reached(*e); })) {
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
    const MutexLock lock(watch_->mutex);
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
    const MutexLock lock(watch_->mutex);
    for (std::list<Pending>* list : all_pending()) {
      for (auto it = list->begin(); it != list->end();) {
        const auto next = std::next(it);
        if (!it->host || it->host->ended) failed.splice(failed.end(), *list, it);
        it = next;
      }
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
  const auto left = [this](std::int64_t more) {  // number of ranks without enqueued work
    try {
      return group_.store_->add("left", more);
    } catch (const Error&) {
      return std::int64_t{group_.size()};  // the store is gone
    }
  };
  MutexLock lock(watch_->mutex);
  std::optional<Deadline> last;  // operations that wait for departed ranks never finish
  // A send is done for its caller once its bytes have been copied, but the receiving rank still needs this one.
  const auto is_busy = [this]() MANIPLE_REQUIRES(watch_->mutex) {
    return !is_idle() || !staged_messages_.empty() || is_sending();
  };
  for (int i = 1; is_busy() && !group_.abort_signal().raised(); ++i) {
    changed_->wait_for(lock.native(), kPause);
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
