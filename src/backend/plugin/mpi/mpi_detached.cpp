#include "backend/plugin/mpi/mpi_detached.h"

#include <pthread.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

namespace maniple::mpi_engine {
namespace {

constexpr auto kLook = std::chrono::milliseconds(10);  // between two looks at abort and deadline

struct State {
  std::function<void()> body;
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;
};

void carry_out(const std::shared_ptr<State>& state) {
  ::pthread_setname_np(::pthread_self(), "maniple-mpi-set");
  std::exception_ptr error;
  try {
    state->body();
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(state->mutex);
  state->error = error;
  state->done = true;
  state->changed.notify_all();
}

}  // namespace

bool run_detached(std::function<void()> body, const AbortToken& abort, Deadline deadline) {
  const auto state = std::make_shared<State>();
  state->body = std::move(body);
  std::thread([state] { carry_out(state); }).detach();
  std::unique_lock lock(state->mutex);
  while (!state->done) {
    if (abort.aborted() || deadline.expired()) return false;
    state->changed.wait_for(lock, kLook);
  }
  if (state->error) std::rethrow_exception(state->error);
  return true;
}

}  // namespace maniple::mpi_engine
