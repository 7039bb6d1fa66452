#include "comm/base/abort_signal.h"

#include <sys/eventfd.h>

namespace maniple {

AbortSignal::AbortSignal() : event_(new_event()) {}

bool AbortSignal::raise(std::exception_ptr cause) {
  {
    const MutexLock lock(mutex_);
    if (cause_) return false;
    cause_ = std::move(cause);
  }
  raised_.store(true, std::memory_order_release);
  {
    const MutexLock lock(listeners_mutex_);
    for (const auto& [ticket, listener] : listeners_) listener();
  }
  ::eventfd_write(event_.get(), 1);  // last, so that threads it wakes find the listeners done
  return true;
}

std::exception_ptr AbortSignal::cause() const {
  const MutexLock lock(mutex_);
  return cause_;
}

void AbortSignal::rethrow() const { std::rethrow_exception(cause()); }

int AbortSignal::on_raise(std::function<void()> listener) {
  const MutexLock lock(listeners_mutex_);
  if (raised()) {
    listener();
    return -1;
  }
  listeners_.emplace_back(next_ticket_, std::move(listener));
  return next_ticket_++;
}

void AbortSignal::forget(int ticket) {
  const MutexLock lock(listeners_mutex_);
  std::erase_if(listeners_, [ticket](const auto& entry) { return entry.first == ticket; });
}

std::string text_of(const std::exception_ptr& cause) {
  if (!cause) return "no error";
  try {
    std::rethrow_exception(cause);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace maniple
