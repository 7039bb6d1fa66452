#include "session/reach.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>

#include <cerrno>

#include "base/system_error.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

constexpr std::chrono::milliseconds kPause{50};
constexpr std::chrono::milliseconds kFarewell{200};

}  // namespace

Reach::Reach(Task task) : task_(std::move(task)), cancel_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!cancel_) throw_system_error("eventfd");
  thread_ = std::thread([this] {
    run();
    finished_.set_value();
  });
  ::pthread_setname_np(thread_.native_handle(), "maniple-reach");
}

Reach::~Reach() {
  auto finished = finished_.get_future();
  if (!dialling_ || finished.wait_for(kFarewell) != std::future_status::ready) ::eventfd_write(cancel_.get(), 1);
  thread_.join();
}

void Reach::run() {
  const auto cancelled = [this](Deadline::Duration wait) {
    pollfd bell{cancel_.get(), POLLIN, 0};
    return ::poll(&bell, 1, Deadline::after(wait).poll_ms()) > 0;
  };
  const auto since = Deadline::Clock::now();
  if (task_.delay.count() > 0 && cancelled(task_.delay)) return;
  for (;;) {
    Result result;
    try {
      dialling_ = true;
      result.connection = task_.dial(Deadline::after(task_.one_try), cancel_.get());
      return task_.done(std::move(result));
    } catch (const Aborted&) {
      return;
    } catch (const SystemError& error) {
      result.refused = error.code() == ECONNREFUSED;
      result.why = error.what();
    } catch (const std::exception& error) {
      result.why = error.what();
    }
    dialling_ = false;
    const std::chrono::duration<double> tried = Deadline::Clock::now() - since;
    if (result.refused || task_.hopeless(tried.count())) return task_.done(std::move(result));
    if (cancelled(kPause)) return;
  }
}

}  // namespace maniple
