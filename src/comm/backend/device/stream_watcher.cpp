#include "comm/backend/device/stream_watcher.h"

#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/error_codec.h"
#include "comm/base/threads.h"

namespace maniple {
namespace {

constexpr auto kSoon = std::chrono::microseconds(20);      // between polls while a host thread waits
constexpr auto kSeldom = std::chrono::microseconds(1000);  // between polls otherwise
constexpr auto kPause = std::chrono::milliseconds(1);
constexpr auto kLeavingTime = std::chrono::seconds(1);  // for enqueued work after all other ranks have left the group
constexpr int kPausesToAsk = 50;                        // pauses between checks whether they have left

}  // namespace

StreamWatcher::StreamWatcher(Options options)
    : options_(std::move(options)), runtime_(*options_.runtime), abort_(*options_.abort) {
  // Notifies under the lock, so that the watching thread cannot miss it between its check and its wait.
  listener_ = std::make_unique<AbortListener>(abort_, [this] {
    const MutexLock lock(watch_->mutex);
    changed_.notify_all();
  });
}

StreamWatcher::~StreamWatcher() {
  stop();
  end_all();
}

void StreamWatcher::watch_engine(DevicePlugin& engine) {
  const MutexLock lock(watch_->mutex);
  engine_ = &engine;
  start();  // an abort must reach the engine, even before the first operation
}

bool StreamWatcher::stop() {
  listener_.reset();
  {
    const MutexLock lock(watch_->mutex);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  const MutexLock lock(watch_->mutex);
  return is_idle();
}

void StreamWatcher::end_all() {
  const auto error = std::make_exception_ptr(Aborted("the group was destroyed with operations under way"));
  std::list<StreamOperation> left;  // destroyed, with the memory it keeps, without the lock
  {
    const MutexLock lock(watch_->mutex);
    for (std::list<StreamOperation>* list : all_pending()) left.splice(left.end(), *list);
  }
  for (StreamOperation& operation : left) retire(operation, error);
}

void StreamWatcher::start() {
  if (thread_.joinable()) return;
  thread_ = start_thread("the operations of a group on a GPU", [this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), "maniple-device");
}

ErrorInfo StreamWatcher::context_of(std::string_view operation, std::uint64_t seq) const {
  ErrorInfo context = options_.context;
  context.operation = operation;
  context.sequence = seq;
  return context;
}

// ---- Adding operations ----------------------------------------------------------------------------------------------

StreamWatcher::Place StreamWatcher::begin(DeviceStream stream) {
  Place place;
  {
    const MutexLock lock(watch_->mutex);
    auto& queue = queues_[stream];
    if (!queue) queue = std::make_shared<Queue>();
    place.queue = queue;
  }
  place.lock = std::unique_lock(place.queue->enqueueing);
  return place;
}

void StreamWatcher::add(StreamOperation operation, Place to) {
  if (operation.work->device.captured) return retire(operation, nullptr);
  append(to.queue->pending, std::move(operation));
}

// Not checked by the analysis: only takes the address; append() locks.
void StreamWatcher::add_arrival(StreamOperation operation) MANIPLE_NO_THREAD_SAFETY_ANALYSIS {
  append(arrivals_, std::move(operation));
}

void StreamWatcher::append(std::list<StreamOperation>& to, StreamOperation operation) {
  bool wake = false;
  {
    const MutexLock lock(watch_->mutex);
    start();
    wake = is_idle();
    to.push_back(std::move(operation));
  }
  if (wake) changed_.notify_all();
}

void StreamWatcher::call_after(std::vector<std::shared_ptr<const DeviceEvent>> events,
                               std::vector<std::shared_ptr<HostEnd>> sends,
                               std::function<void(const std::exception_ptr& error)> then) {
  {
    const MutexLock lock(watch_->mutex);
    start();
    is_sending();  // forgets sends that have arrived
    sends_.insert(sends_.end(), sends.begin(), sends.end());
    calls_.push_back({std::move(events), std::move(then)});
  }
  changed_.notify_all();
}

bool StreamWatcher::is_sending() {
  std::erase_if(sends_, [](const std::shared_ptr<HostEnd>& send) { return send->ended.load(); });
  return !sends_.empty();
}

bool StreamWatcher::is_idle() const {
  return arrivals_.empty() &&
         std::all_of(queues_.begin(), queues_.end(), [](const auto& one) { return one.second->pending.empty(); });
}

std::vector<std::list<StreamOperation>*> StreamWatcher::all_pending() {
  std::vector<std::list<StreamOperation>*> lists = {&arrivals_};
  for (const auto& [stream, queue] : queues_) lists.push_back(&queue->pending);
  return lists;
}

// ---- Watching -------------------------------------------------------------------------------------------------------

void StreamWatcher::run() {
  on_group_thread = true;
  MutexLock lock(watch_->mutex);
  while (!stopping_) {
    // Captured operations are not in any list, so idleness alone does not decide.
    const bool to_abort = engine_ != nullptr && !gave_up_ && abort_.raised();
    if (is_idle() && calls_.empty() && !to_abort) {
      changed_.notify_all();  // drain() waits for this
      changed_.wait(lock);
      continue;
    }
    lock.unlock();
    try {
      poll();
    } catch (...) {
      await_first_cause();
      give_up(std::current_exception(), context_of("device"));
    }
    lock.lock();
    if (stopping_) break;
    // Calls start messages once their data has been copied, and another rank may be waiting for them.
    const bool soon = watch_->waiting != 0 || !calls_.empty();
    changed_.wait_for(lock, soon ? kSoon : kSeldom);
  }
}

// A stream ends its operations in queue order, so a binary search polls few events.
std::vector<StreamWatcher::Position> StreamWatcher::take_ended(std::vector<Position>& queue) {
  const auto has_ended = [this](const Position& it) { return runtime_.reached(*it->work->device.event); };
  if (!has_ended(queue.front())) return {};
  const auto rest =
      has_ended(queue.back()) ? queue.end() : std::partition_point(queue.begin() + 1, queue.end() - 1, has_ended);
  std::vector<Position> ended(queue.begin(), rest);
  queue.erase(queue.begin(), rest);
  return ended;
}

void StreamWatcher::poll() {
  if (abort_.raised()) return give_up(abort_.cause(), {});
  make_calls();
  std::vector<std::vector<Position>> queues;  // other threads only add to the lists
  std::vector<Position> arrivals;
  const auto positions_in = [](std::list<StreamOperation>& list) {
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
  const DeviceFault fault = engine_ != nullptr ? engine_->fault() : DeviceFault{};
  const bool good = fault.kind == DeviceFault::Kind::none;
  std::list<StreamOperation> done;  // destroyed, with the memory it keeps, without the lock
  for (const Position& it : ended) {
    if (!good && it->recorded && it->context.sequence >= fault.seq) continue;  // give_up() retires it
    retire(*it.at, it->host && it->host->ended ? it->host->error : nullptr);
    const MutexLock guard(watch_->mutex);
    done.splice(done.end(), *it.list, it.at);
  }
  if (!good) return give_up_on_fault(fault);
  StreamOperation* oldest = nullptr;  // of the operations that the engine reports on: only this one can be waiting
  for (const auto& queue : queues) {
    const auto first = std::find_if(queue.begin(), queue.end(), [](const Position& it) { return it->reported; });
    if (first == queue.end()) continue;
    if (oldest == nullptr || (*first)->context.sequence < oldest->context.sequence) oldest = &*first->at;
  }
  // Only the front of each stream's queue can be running.
  for (const auto& queue : queues) {
    if (queue.empty()) continue;
    StreamOperation& front = *queue.front().at;
    if (is_left(front) || is_late(front, &front == oldest)) return;
  }
}

void StreamWatcher::make_calls() {
  std::vector<Call> ready;
  {
    const MutexLock lock(watch_->mutex);
    for (auto it = calls_.begin(); it != calls_.end();) {
      if (!std::all_of(it->events.begin(), it->events.end(), [this](const auto& e) { return runtime_.reached(*e); })) {
        ++it;
        continue;
      }
      ready.push_back(std::move(*it));
      it = calls_.erase(it);
    }
  }
  for (const Call& call : ready) call.then(nullptr);
}

bool StreamWatcher::is_left(const StreamOperation& operation) {
  const int gone = operation.recorded ? options_.observer->left_before(operation.context.sequence) : -1;
  if (gone < 0) return false;
  ErrorInfo info;
  info.ranks = {gone};
  info.origin = gone;
  info.loss = LossKind::left;
  info.reason = fmt::format("rank {} has left the group (it was destroyed there) before this operation", gone);
  give_up(std::make_exception_ptr(PeerLost(std::move(info))), ErrorInfo(operation.context));
  return true;
}

bool StreamWatcher::is_late(StreamOperation& operation, bool oldest) {
  if (!operation.running) {
    operation.running = operation.reported  ? oldest && engine_->waits() == DevicePlugin::Waits::yes
                        : operation.started ? runtime_.reached(*operation.started)
                                            : true;
    operation.deadline = Deadline::after(operation.limit);
    operation.compare = Deadline::after(operation.compare_after);
  }
  // Engines compare at most device operations with each other. This also detects a rank in a host operation.
  if (operation.running && operation.recorded && operation.compare.expired()) {
    options_.observer->compare_calls(operation.context.sequence);
    operation.compare_after = std::min<Seconds>(2 * operation.compare_after, std::chrono::minutes(1));
    operation.compare = Deadline::after(operation.compare_after);
  }
  if (!operation.running || !operation.deadline.expired()) return false;
  const double limit = operation.limit.count();
  std::string reason = fmt::format(
      "timed out after {:.1f} s: this rank's stream has reached the operation, another rank's has not", limit);
  std::vector<int> ranks;
  bool called = true;
  if (engine_ != nullptr) {
    for (const LateRank& late : engine_->late_ranks(operation.context.sequence)) {
      ranks.push_back(options_.global_ranks[late.rank]);
      called = called && late.called;
    }
  }
  if (!ranks.empty()) {
    const auto size = options_.global_ranks.size();
    reason = fmt::format("timed out after {:.1f} s: {} of {} ranks arrived, waiting for rank{} {}{}", limit,
                         size - ranks.size(), size, ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "),
                         called ? ", whose streams are busy with what they hold before it" : "");
  }
  give_up(std::make_exception_ptr(Timeout(reason, std::move(ranks), limit)), ErrorInfo(operation.context));
  return true;
}

// ---- Ending operations ----------------------------------------------------------------------------------------------

void StreamWatcher::give_up_on_fault(const DeviceFault& fault) {
  ErrorInfo context = context_of("device", fault.seq);
  {
    const MutexLock guard(watch_->mutex);
    bool found = false;  // the oldest operation, unless the engine names one
    for (const std::list<StreamOperation>* list : all_pending()) {
      for (const StreamOperation& operation : *list) {
        if (!operation.recorded || (fault.seq != 0 && operation.context.sequence != fault.seq)) continue;
        if (found && operation.context.sequence >= context.sequence) continue;
        context = operation.context;
        found = true;
      }
    }
  }
  if (fault.kind == DeviceFault::Kind::mismatch) {
    return give_up(std::make_exception_ptr(Mismatch("the ranks called different operations")), context);
  }
  await_first_cause();
  give_up(std::make_exception_ptr(SystemError(fmt::format("{}: {}", engine_->name(), fault.reason), 0)), context);
}

void StreamWatcher::await_first_cause() {
  constexpr int kDetectorMs = 300;
  pollfd raised{abort_.fd(), POLLIN, 0};
  if (options_.global_ranks.size() > 1) ::poll(&raised, 1, kDetectorMs);
}

void StreamWatcher::retire(StreamOperation& operation, const std::exception_ptr& error) {
  if (operation.recorded) options_.observer->ended(operation.context.sequence, error != nullptr);
  if (operation.work->device.arrival) operation.work->device.arrival->close();
  operation.work->finish(error);
}

void StreamWatcher::give_up(const std::exception_ptr& error, const ErrorInfo& context) {
  const std::exception_ptr cause = abort_.raised() ? abort_.cause() : options_.observer->failed(error, context);
  if (engine_ != nullptr) engine_->abort();
  gave_up_ = true;
  std::vector<Call> calls;
  std::list<StreamOperation> failed;
  {
    const MutexLock lock(watch_->mutex);
    calls.swap(calls_);
  }
  for (const Call& call : calls) call.then(cause);
  {
    const MutexLock lock(watch_->mutex);
    for (std::list<StreamOperation>* list : all_pending()) {
      for (auto it = list->begin(); it != list->end();) {
        const auto next = std::next(it);
        if (!it->host || it->host->ended) failed.splice(failed.end(), *list, it);
        it = next;
      }
    }
  }
  for (StreamOperation& operation : failed) {
    const bool own = operation.host && (operation.host->error || operation.work->device.is_reached());
    retire(operation, own ? operation.host->error : with_context(operation.context, cause));
  }
}

bool StreamWatcher::drain(const std::function<bool()>& pointless) {
  MutexLock lock(watch_->mutex);
  std::optional<Deadline> last;  // operations that wait for departed ranks never end
  // A send is done for its caller once its bytes have been copied, but the receiving rank still needs this one.
  const auto is_busy = [this]()
                           MANIPLE_REQUIRES(watch_->mutex) { return !is_idle() || !calls_.empty() || is_sending(); };
  for (int i = 1; is_busy() && !abort_.raised(); ++i) {
    changed_.wait_for(lock, kPause);
    if (last && last->expired()) return false;
    if (last || i % kPausesToAsk != 0) continue;
    lock.unlock();
    if (pointless()) last = Deadline::after(kLeavingTime);
    lock.lock();
  }
  return true;
}

}  // namespace maniple
