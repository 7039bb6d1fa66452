#include "plugins/nccl/nccl_communicator.h"

#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

namespace maniple::nccl_plugin {
namespace {

using Clock = Deadline::Clock;
using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kTurn(50);               // interval at which a wait checks for an abort
constexpr Milliseconds kStoreTurn(500);         // the same, if each check is a request to the store
constexpr Milliseconds kInside(100);            // a call takes longer only when it waits for another rank
constexpr std::chrono::seconds kCleaningUp(5);  // for NCCL's clean-up, which usually takes half a second

std::string seconds_since(Clock::time_point begin) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", std::chrono::duration<double>(Clock::now() - begin).count());
  return text;
}

std::string joined(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i == 8) return text + ", ...";
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

/// Lets the ranks find each other in the store. Rank 0 requests NCCL's unique id only when all ranks have arrived,
/// because a wait inside NCCL can neither be ended nor report the missing ranks.
class Rendezvous {
 public:
  explicit Rendezvous(const DeviceContext& context) : context_(context) {
    // A group may be set up again for another device: all ranks count their arrivals in step.
    const std::int64_t arrival = context.store->add("nccl/arrivals", 1) - 1;
    prefix_ = "nccl/" + std::to_string(arrival / context.size()) + "/";
    context.store->set(here(context.rank), "1");
    if (arrival % context.size() == context.size() - 1) context.store->set(prefix_ + "all", "1");
  }

  ncclUniqueId unique_id() {
    ncclUniqueId id;
    if (context_.rank == 0) {
      await("all");
      if (const ncclResult_t result = nccl().get_unique_id(&id); result != ncclSuccess)
        throw SystemError("NCCL has no address for other ranks to connect to: " + describe(result), 0);
      context_.store->set(prefix_ + "id", {id.internal, sizeof id.internal});
      return id;
    }
    await("id");
    const std::string text = context_.store->get(prefix_ + "id", context_.deadline);
    if (text.size() != sizeof id.internal) throw ProtocolError("the unique id of NCCL in the store has another size");
    std::memcpy(id.internal, text.data(), sizeof id.internal);
    return id;
  }

  void require_alive() const {
    if (context_.abort != nullptr && context_.abort->aborted())
      throw Aborted("the group failed while it was set up by NCCL, after " + seconds_since(begin_));
    if (context_.deadline.expired()) throw timeout();
  }

 private:
  std::string here(int rank) const { return prefix_ + "here/" + std::to_string(rank); }

  void await(const char* key) const {
    const std::string keys[] = {prefix_ + key};
    for (;;) {
      require_alive();
      try {
        return context_.store->wait(keys, Deadline::sooner(context_.deadline, Deadline::after(kStoreTurn)));
      } catch (const Timeout&) {
        continue;
      }
    }
  }

  Timeout timeout() const {
    std::vector<std::string> keys;
    for (int rank = 0; rank < context_.size(); ++rank) keys.push_back(here(rank));
    const std::vector<bool> arrived = context_.store->check(keys);
    std::vector<int> missing;
    for (int rank = 0; rank < context_.size(); ++rank)
      if (!arrived[static_cast<std::size_t>(rank)])
        missing.push_back(context_.global_ranks[static_cast<std::size_t>(rank)]);
    const double waited = std::chrono::duration<double>(Clock::now() - begin_).count();
    const std::string text = "NCCL's communicator of " + context_.group + " timed out after " + seconds_since(begin_);
    if (missing.empty())
      return {text + ": all ranks arrived, but they did not connect; NCCL_DEBUG=INFO shows why", {}, waited};
    return {text + ": " + std::to_string(keys.size() - missing.size()) + " of " + std::to_string(keys.size()) +
                " ranks arrived, waiting for " + joined(missing),
            missing, waited};
  }

  const DeviceContext& context_;
  Clock::time_point begin_ = Clock::now();
  std::string prefix_;
};

/// State shared by the thread that initialises the communicator and the thread that waits for it.
struct Initialisation {
  Mutex mutex;
  bool given_up MANIPLE_GUARDED_BY(mutex) = false;
  ncclComm_t comm MANIPLE_GUARDED_BY(mutex) = nullptr;
  ncclResult_t result MANIPLE_GUARDED_BY(mutex) = ncclSuccess;
  std::string text MANIPLE_GUARDED_BY(mutex);  // error text
  bool polled MANIPLE_GUARDED_BY(mutex) = false;
};

void initialise(Initialisation& shared, ncclUniqueId id, int size, int rank) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  ncclComm_t comm = nullptr;
  ncclResult_t result = nccl().comm_init(&comm, size, id, rank, &config);
  const bool polled = result == ncclInProgress;
  while (result == ncclInProgress) {
    std::this_thread::sleep_for(Milliseconds(1));  // sleep: NCCL can only be polled
    const MutexLock lock(shared.mutex);
    if (shared.given_up || nccl().async_error(comm, &result) != ncclSuccess) break;
  }
  std::string text = result == ncclSuccess ? "" : describe(result);
  const MutexLock lock(shared.mutex);
  if (comm != nullptr && (shared.given_up || (polled && result != ncclSuccess))) {
    nccl().comm_abort(comm);
    comm = nullptr;
  }
  shared.comm = comm;
  shared.result = result;
  shared.text = std::move(text);
  shared.polled = polled;
}

}  // namespace

// ---- Devices --------------------------------------------------------------------------------------------------------

void check_cuda(cudaError_t result, const std::string& what) {
  if (result == cudaSuccess) return;
  ::cudaGetLastError();  // clears the error, or the next call would report it again
  throw SystemError(what + " failed: " + ::cudaGetErrorString(result), 0);
}

struct Task::State {
  Mutex mutex;
  CondVar changed;
  bool done MANIPLE_GUARDED_BY(mutex) = false;
  std::exception_ptr error;  // set before done
};

bool Task::wait_for(Milliseconds time) const {
  MutexLock lock(state_->mutex);
  return state_->changed.wait_for(lock, time, [this]() MANIPLE_REQUIRES(state_->mutex) { return state_->done; });
}

void Task::wait() const {
  MutexLock lock(state_->mutex);
  state_->changed.wait(lock, [this]() MANIPLE_REQUIRES(state_->mutex) { return state_->done; });
}

void Task::get() const {
  wait();
  if (state_->error) std::rethrow_exception(state_->error);
}

Task on_device(int device, std::function<void()> body) {
  Task task;
  task.state_ = std::make_shared<Task::State>();
  std::thread([state = task.state_, device, body = std::move(body)]() mutable {
    std::exception_ptr error;
    try {
      check_cuda(::cudaSetDevice(device), "cudaSetDevice of cuda:" + std::to_string(device));
      cudaStreamCaptureMode mode =
          cudaStreamCaptureModeRelaxed;  // the calls here do not affect a graph that another thread captures
      ::cudaThreadExchangeStreamCaptureMode(&mode);
      body();
    } catch (...) {
      error = std::current_exception();
    }
    body = nullptr;  // destroys its captures before the work counts as done
    const MutexLock lock(state->mutex);
    state->error = error;
    state->done = true;
    state->changed.notify_all();
  }).detach();
  return task;
}

// ---- Setting up -----------------------------------------------------------------------------------------------------

std::shared_ptr<Communicator> Communicator::make(const DeviceContext& context) {
  Rendezvous rendezvous(context);
  const ncclUniqueId id = rendezvous.unique_id();

  const auto shared = std::make_shared<Initialisation>();
  const Task done = on_device(context.device, [shared, id, size = context.size(), rank = context.rank] {
    initialise(*shared, id, size, rank);
  });
  try {
    while (!done.wait_for(kTurn)) rendezvous.require_alive();
  } catch (...) {
    const MutexLock lock(shared->mutex);
    shared->given_up = true;
    if (shared->comm != nullptr) on_device(context.device, [comm = shared->comm] { nccl().comm_abort(comm); });
    throw;
  }
  done.get();  // rethrows the thread's exception
  const MutexLock lock(shared->mutex);
  const std::string place = context.group + " on cuda:" + std::to_string(context.device);
  if (shared->result == ncclInvalidUsage || shared->result == ncclInvalidArgument)
    throw Unsupported("NCCL refuses to make the communicator of " + place + ": " + shared->text +
                      "; it wants a GPU of its own for each rank: the cuda backend lets ranks share one");
  if (shared->result != ncclSuccess)
    throw SystemError("NCCL did not make the communicator of " + place + ": " + shared->text, 0);
  return std::shared_ptr<Communicator>(new Communicator(context, shared->comm, shared->polled));
}

Communicator::Communicator(const DeviceContext& context, ncclComm_t comm, bool polled)
    : group_(context.group),
      rank_(context.rank),
      size_(context.size()),
      device_(context.device),
      polled_(polled),
      comm_(comm) {}

// ---- Calls ----------------------------------------------------------------------------------------------------------

ncclComm_t Communicator::usable(const char* what) const {
  const ncclComm_t comm = comm_.load();
  if (comm == nullptr || aborted_.load())
    throw Aborted(std::string("NCCL's communicator of ") + group_ + " was aborted, before " + what);
  return comm;
}

ncclResult_t Communicator::finished(ncclComm_t comm, ncclResult_t result) const noexcept {
  if (!polled_) return result;
  // Some calls return success although they are still in progress.
  while (result == ncclSuccess || result == ncclInProgress) {
    if (aborted_.load() || nccl().async_error(comm, &result) != ncclSuccess) break;
    if (result == ncclSuccess) break;
    std::this_thread::yield();
  }
  return result;
}

void Communicator::fail(const char* what, ncclResult_t result) {
  if (aborted_.load()) throw Aborted(std::string("NCCL's communicator of ") + group_ + " was aborted during " + what);
  failed_ = true;
  const std::string text = std::string(what) + " failed: NCCL says " + describe(result);
  if (result == ncclRemoteError) throw PeerLost(text, -1);
  throw SystemError(text, 0);
}

DeviceFault Communicator::fault() noexcept {
  const std::unique_lock lock(calls_, std::try_to_lock);
  if (!lock.owns_lock()) return {};  // a running call reports its own errors
  const ncclComm_t comm = comm_.load();
  if (comm == nullptr) return {};
  ncclResult_t state = ncclSuccess;
  if (const ncclResult_t asked = nccl().async_error(comm, &state); asked != ncclSuccess) state = asked;
  if (state == ncclSuccess || state == ncclInProgress) return {};
  failed_ = true;
  return {DeviceFault::Kind::failed, "NCCL says " + describe(state)};
}

// ---- Registered memory ----------------------------------------------------------------------------------------------

void Communicator::call_within(Deadline deadline, const char* what, std::function<void()> body) {
  const Clock::time_point begin = Clock::now();
  const Task done = on_device(device_, std::move(body));
  while (!done.wait_for(kTurn)) {
    if (!deadline.expired()) continue;
    abort();
    throw Timeout(std::string(what) + " of " + group_ + " timed out after " + seconds_since(begin) +
                  " inside NCCL: not all of its " + std::to_string(size_) + " ranks called it");
  }
  done.get();  // rethrows the body's exception
}

void Communicator::register_memory(void* memory, std::size_t bytes, bool symmetric) {
  const NcclLibrary& library = nccl();
  call("registering memory", [&](ncclComm_t comm) {
    constexpr int kSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC
    Registration made;
    if (symmetric && library.window_register != nullptr) {
      if (finished(comm, library.window_register(comm, memory, bytes, &made.handle, kSymmetric)) != ncclSuccess)
        made.handle = nullptr;
      made.window = made.handle != nullptr;
    }
    ncclResult_t result = ncclSuccess;
    if (made.handle == nullptr && library.comm_register != nullptr)
      result = library.comm_register(comm, memory, bytes, &made.handle);
    if (result == ncclSuccess) registrations_[memory] = made;
    return result;
  });
}

void Communicator::forget(ncclComm_t comm, const Registration& registration) const noexcept {
  if (registration.handle == nullptr) return;
  if (registration.window) {
    nccl().window_deregister(comm, registration.handle);
  } else {
    nccl().comm_deregister(comm, registration.handle);
  }
}

void Communicator::deregister(void* memory) noexcept {
  Task ended;
  {
    const MutexLock lock(ending_);
    ended = ended_;
  }
  if (ended.valid()) ended.wait_for(kCleaningUp);  // NCCL may still access the memory
  const std::lock_guard lock(calls_);
  const auto found = registrations_.find(memory);
  if (found == registrations_.end()) return;
  if (const ncclComm_t comm = comm_.load(); comm != nullptr) forget(comm, found->second);
  registrations_.erase(found);
}

// ---- The end --------------------------------------------------------------------------------------------------------

// NCCL cleans up in a separate thread. That takes half a second, or until the last CUDA graph with one of its
// operations is gone.
void Communicator::end(ncclResult_t (*by)(ncclComm_t)) noexcept {
  std::unique_lock lock(calls_, std::defer_lock);
  // If the lock is not free, a thread inside NCCL waits for another rank. NCCL's abort first releases that thread
  // (measured: within a millisecond) and frees memory only after its own threads have ended (half a second).
  const bool alone = lock.try_lock_for(kInside);
  const ncclComm_t comm = comm_.exchange(nullptr);
  if (comm == nullptr) return;
  if (alone && by != nccl().comm_abort)
    for (const auto& [memory, registration] : registrations_) forget(comm, registration);
  if (alone) registrations_.clear();
  if (alone) lock.unlock();
  const MutexLock ending(ending_);
  try {
    ended_ = on_device(device_, [comm, by] { by(comm); });
  } catch (...) {
    by(comm);  // no thread could be started
  }
}

void Communicator::abort() noexcept {
  if (!aborted_.exchange(true)) end(nccl().comm_abort);
}

void Communicator::leave() noexcept {
  if (fault().kind == DeviceFault::Kind::none && !failed_ && !aborted_.load()) {
    end(nccl().comm_destroy);
  } else {
    abort();
  }
  const MutexLock lock(ending_);
  if (ended_.valid()) ended_.wait_for(kCleaningUp);
}

}  // namespace maniple::nccl_plugin
