#include "plugins/mpi/mpi_runtime.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <sstream>

#include "comm/backend/plugin/mpirun.h"
#include "plugins/mpi/mpi_channel.h"
#include "plugins/mpi/mpi_implementation.h"

namespace maniple::mpi_plugin {
namespace {

constexpr long kPollNs = 100'000;
constexpr long kShortestNs = 20'000;  // between two polls of a barrier at exit
constexpr long kLongestNs = 5'000'000;
constexpr auto kLinger = std::chrono::seconds(5);  // at exit, for sent messages that are not received yet
constexpr Deadline::Duration kEnded =
    std::chrono::seconds(10);                                // at exit, for other ranks when a rank has left too early
constexpr auto kFinalise = std::chrono::seconds(30);         // for MPI_Finalize when all ranks are about to exit
constexpr auto kLivesPoll = std::chrono::milliseconds(100);  // at exit, interval for polling the other processes
// After another process has ended: the time for messages it had sent, and the time for MPI_Finalize, which that process
// may have completed in good order.
constexpr Deadline::Duration kAfterAnEnd = std::chrono::seconds(2);
constexpr Deadline::Duration kFinaliseAfterAnEnd = std::chrono::seconds(5);
constexpr auto kLockPoll = std::chrono::milliseconds(10);
std::atomic<bool> init_abandoned{false};

void pause(long ns = kPollNs) {
  const timespec time{0, ns};
  ::nanosleep(&time, nullptr);  // sleep: MPI_Test has no wait with a limit
}

constexpr auto kDetachedPoll = std::chrono::milliseconds(10);  // for polling abort and deadline

/// A process's start time in the clock ticks of /proc; empty if it does not exist or is a zombie.
std::string start_of(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const auto end = line.rfind(')');  // the name in parentheses may contain any character
  if (end == std::string::npos) return {};
  std::istringstream words(line.substr(end + 1));
  std::string word;
  words >> word;  // the third field, the state
  if (word == "Z" || word == "X") return {};
  constexpr int kStart = 22;
  for (int field = 3; field < kStart; ++field) words >> word;
  return word;
}

struct DetachedCall {
  std::function<void()> body;
  Mutex mutex;
  CondVar changed;
  bool done MANIPLE_GUARDED_BY(mutex) = false;
  std::exception_ptr error MANIPLE_GUARDED_BY(mutex);
};

void run_call(const std::shared_ptr<DetachedCall>& state) {
  ::pthread_setname_np(::pthread_self(), "maniple-mpi-set");
  std::exception_ptr error;
  try {
    state->body();
  } catch (...) {
    error = std::current_exception();
  }
  const MutexLock lock(state->mutex);
  state->error = error;
  state->done = true;
  state->changed.notify_all();
}

}  // namespace

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw SystemError(std::string(call) + " failed: " + std::string(text, static_cast<std::size_t>(length)), EIO);
}

Runtime& Runtime::start(const PluginContext& context) {
  int there = 0;
  MPI_Initialized(&there);
  if (there == 0 && !started_by_mpirun()) throw Unsupported(needs_mpirun(context.world_size));
  if (!init_abandoned && run_detached([] { get(); }, *context.abort, context.deadline)) {
    if (get().guard_.owned()) return get();
    throw Unsupported(
        "the mpi backend: MPI belongs to the process that this one was forked from; use another backend here, or fork "
        "before init()");
  }
  init_abandoned = true;
  throw Timeout("MPI_Init_thread did not return in time: it waits for all ranks of mpirun");
}

Runtime& Runtime::get() {
  static Runtime* const kRuntime = new Runtime();  // never destroyed: exit handlers and threads use it to the end
  return *kRuntime;
}

Runtime::Runtime() {
  int there = 0;
  MPI_Initialized(&there);
  int level = MPI_THREAD_SINGLE;
  if (there == 0) {
    choose_transports();
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    watch_for_losses();
    ours_ = true;
  } else {
    int over = 0;
    MPI_Finalized(&over);
    if (over != 0) throw Unsupported("the mpi backend: this program has finalised MPI already");
    check(MPI_Query_thread(&level), "MPI_Query_thread");
  }
  if (level < MPI_THREAD_SERIALIZED) {
    throw Unsupported(
        "the mpi backend needs an MPI that several threads may call; call MPI_Init_thread with MPI_THREAD_MULTIPLE");
  }
  serialised_ = level < MPI_THREAD_MULTIPLE;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  if (!ours_) {
    int key = MPI_KEYVAL_INVALID;
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, before_finalize, &key, nullptr);
    MPI_Comm_set_attr(MPI_COMM_SELF, key, this);
  }
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
  ::on_exit(at_exit, this);
}

std::unique_lock<std::timed_mutex> Runtime::enter() {
  std::unique_lock lock(calls_, std::defer_lock);
  // Polls, because an abandoned call in MPI keeps the lock.
  while (serialised_ && usable() && !lock.try_lock_for(kLockPoll)) {
  }
  if (usable()) return lock;
  const MutexLock reason(mutex_);
  throw Aborted(finalised_ ? std::string("MPI has been finalised") : "MPI is unusable in this process: " + why_);
}

void Runtime::send(const std::shared_ptr<Packet>& packet, std::size_t size, int to, int tag, MPI_Comm communicator) {
  {
    const auto call = enter();
    check(MPI_Isend(packet->bytes.get(), static_cast<int>(size), MPI_BYTE, to, tag, communicator, &packet->request),
          "MPI_Isend");
  }
  int done = 0;
  {
    const auto call = enter();
    check(MPI_Test(&packet->request, &done, MPI_STATUS_IGNORE), "MPI_Test");  // small messages complete at once
  }
  if (done == 0) keep(packet);
}

void Runtime::keep(const std::shared_ptr<Packet>& packet) {
  packet->in_transit.store(true);
  const MutexLock lock(mutex_);
  packets_.push_back(packet);
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { progress_sends(); });
    ::pthread_setname_np(thread_.native_handle(), "maniple-mpi");
  }
  changed_.notify_all();
}

void Runtime::sweep() {
  const MutexLock lock(mutex_);
  sweep_locked();
}

void Runtime::sweep_locked() {
  if (!usable()) return;
  std::unique_lock call(calls_, std::defer_lock);
  if (serialised_ && !call.try_lock_for(kLockPoll)) return;
  std::erase_if(packets_, [](const std::shared_ptr<Packet>& packet) {
    int done = 0;
    if (MPI_Test(&packet->request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) done = 1;  // the receiver is gone
    if (done != 0) packet->in_transit.store(false, std::memory_order_release);
    return done != 0;
  });
}

// MPI moves bytes only during MPI calls, and a rank that sends and then computes makes none.
void Runtime::progress_sends() {
  MutexLock lock(mutex_);
  while (!stopping_) {
    if (packets_.empty() || !usable()) {
      changed_.wait(lock);
      continue;
    }
    sweep_locked();
    if (packets_.empty()) continue;
    lock.unlock();
    pause();
    lock.lock();
  }
}

void Runtime::all_have_started() {
  if (ours_) remove_segment_file();  // a program that initialised MPI itself may start more processes with it
}

void Runtime::watch(const std::vector<int>& pids) {
  const MutexLock lock(mutex_);
  for (const int pid : pids) {
    const std::string start = start_of(pid);
    if (!start.empty()) watched_.emplace(pid, start);  // empty: the pid belongs to another namespace
  }
}

bool Runtime::a_rank_has_ended() {
  const MutexLock lock(mutex_);
  return std::any_of(watched_.begin(), watched_.end(),
                     [](const auto& process) { return start_of(process.first) != process.second; });
}

void Runtime::poison(const std::string& why) noexcept {
  const MutexLock lock(mutex_);
  if (!poisoned_.exchange(true)) why_ = why;
}

// Called at the start of the program's own MPI_Finalize.
int Runtime::before_finalize(MPI_Comm, int, void* runtime, void*) {
  auto* self = static_cast<Runtime*>(runtime);
  if (self->usable() && !self->failed_) LeaveNotices::get().receive_all(Deadline::after(kLinger));
  const MutexLock lock(self->mutex_);  // no sweep meanwhile
  self->finalised_.store(true);
  return MPI_SUCCESS;
}

void Runtime::at_exit(int status, void* runtime) { static_cast<Runtime*>(runtime)->finalise(status); }

void Runtime::finalise(int status) {
  if (!guard_.owned()) return;  // this is a forked child, not the rank
  int over = 0;
  MPI_Finalized(&over);
  const bool safe = ours_ && over == 0 && usable() && !failed_ && status == 0;
  if (safe) LeaveNotices::get().send_all();  // groups that still exist at exit are not used any more
  const bool together = safe && await_all_ranks() && await_all_ranks();
  if (together) LeaveNotices::get().receive_all(Deadline::after(kLinger));
  if (!together) linger();
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  finalised_.store(true);
  if (!together) return;
  std::thread([this, status] { limit_finalise(status); }).detach();
  drop_connections();
  restore_segment_file();
  MPI_Finalize();
  has_finalised_.store(true);
}

// A rank that took part in the barriers may be gone because it gave up waiting for this one. MPI_Finalize would then
// wait for that rank in vain.
void Runtime::limit_finalise(int status) {
  Deadline limit = Deadline::after(kFinalise);
  const char* why = "within 30 s";
  for (bool ended = false; !limit.expired();) {
    std::this_thread::sleep_for(kLivesPoll);  // sleep: MPI_Finalize has no limit of its own
    if (has_finalised_) return;               // the rest of the exit belongs to the program
    if (ended || !a_rank_has_ended()) continue;
    ended = true;
    limit = Deadline::sooner(limit, Deadline::after(kFinaliseAfterAnEnd));
    why = "within 5 s after another rank had ended";
  }
  std::fprintf(stderr, "maniple: warning: MPI_Finalize did not end %s; this process ends without it\n", why);
  ::_exit(status);
}

// Waits for the other ranks before MPI_Finalize, which spins while it waits or does not move the bytes that other ranks
// still need. Called twice: connections opened for the first barrier may delay its end, but not the second's.
bool Runtime::await_all_ranks() {
  const auto began = Deadline::Clock::now();
  Deadline next_look = Deadline::after(kLivesPoll);
  Deadline limit_after_end = Deadline::never();
  try {
    MPI_Request request = MPI_REQUEST_NULL;
    {
      const auto call = enter();
      check(MPI_Ibarrier(MPI_COMM_WORLD, &request), "MPI_Ibarrier");
    }
    for (long pause_ns = kShortestNs;; pause_ns = std::min(pause_ns * 2, kLongestNs)) {
      int done = 0;
      {
        const auto call = enter();
        check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      }
      if (done != 0) return true;
      if (Deadline::Clock::now() - began > (ended_ ? std::min(exit_limit(), kEnded) : exit_limit())) return false;
      if (limit_after_end.expired()) return false;
      if (limit_after_end.is_never() && next_look.expired()) {
        if (a_rank_has_ended()) limit_after_end = Deadline::after(kAfterAnEnd);
        next_look = Deadline::after(kLivesPoll);
      }
      pause(pause_ns);
    }
  } catch (const Error&) {
    return false;  // MPI has lost a rank or is poisoned
  }
}

void Runtime::linger() {
  for (const Deadline limit = Deadline::after(kLinger); usable() && !failed_ && !limit.expired(); pause()) {
    const MutexLock lock(mutex_);
    sweep_locked();
    if (std::none_of(packets_.begin(), packets_.end(), [](const auto& packet) { return packet->awaited; })) return;
  }
}

bool run_detached(std::function<void()> body, const AbortToken& abort, Deadline deadline) {
  const auto state = std::make_shared<DetachedCall>();
  state->body = std::move(body);
  std::thread([state] { run_call(state); }).detach();
  MutexLock lock(state->mutex);
  while (!state->done) {
    if (abort.aborted() || deadline.expired()) return false;
    state->changed.wait_for(lock, kDetachedPoll);
  }
  if (state->error) std::rethrow_exception(state->error);
  return true;
}

}  // namespace maniple::mpi_plugin
