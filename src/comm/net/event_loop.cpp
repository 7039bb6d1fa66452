#include "comm/net/event_loop.h"

#include <pthread.h>

#include <cerrno>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "comm/base/log.h"
#include "comm/base/mutex.h"
#include "comm/base/system_error.h"
#include "comm/base/threads.h"
#include "comm/base/unique_fd.h"

namespace maniple {

struct EventLoop::Impl {
  using Token = Poller::Token;

  Poller poller;
  UniqueFd wake = new_event();

  Mutex mutex;                                  // also guards `poller`, except in wait()
  CondVar idle;                                 // signals changes of `running`
  Token running MANIPLE_GUARDED_BY(mutex) = 0;  // token of the running callback
  bool stopping MANIPLE_GUARDED_BY(mutex) = false;
  std::vector<std::function<void()>> posted MANIPLE_GUARDED_BY(mutex);

  static thread_local const Impl* current;

  Impl() {
    poller.add(wake.get(), EPOLLIN, [this](std::uint32_t) {
      std::uint64_t count = 0;
      const auto got = ::read(wake.get(), &count, sizeof(count));
      (void)got;
    });
  }

  void ring() {
    const std::uint64_t one = 1;
    const auto written = ::write(wake.get(), &one, sizeof(one));
    (void)written;  // a full counter means that the wake-up is pending already
  }

  void await_not_running(MutexLock& lock, Token token) MANIPLE_REQUIRES(mutex) {
    if (current != this) idle.wait(lock, [&]() MANIPLE_REQUIRES(mutex) { return running != token; });
  }

  static void note(const std::string& failure) {
    log_line(LogLevel::error, "a callback of the event loop failed: " + failure);
  }

  // An exception that left the loop's thread would end the process with all its groups.
  template <class Callback>
  static void run_guarded(Callback&& callback) {
    try {
      callback();
    } catch (...) {
      note(current_exception_text());
    }
  }

  // Not checked: it unlocks the caller's `lock` while the callbacks run.
  void run_posted(MutexLock& lock) MANIPLE_REQUIRES(mutex) MANIPLE_NO_THREAD_SAFETY_ANALYSIS {
    std::vector<std::function<void()>> batch;
    batch.swap(posted);
    lock.unlock();
    for (auto& callback : batch) run_guarded(callback);
    batch.clear();
    lock.lock();
  }

  void run() {
    current = this;
    MutexLock lock(mutex);
    // Not checked: it unlocks run()'s `lock`.
    const auto run_unlocked = [&](Token token, const auto& callback) MANIPLE_NO_THREAD_SAFETY_ANALYSIS {
      running = token;
      lock.unlock();
      run_guarded(callback);
      lock.lock();
      running = 0;
      idle.notify_all();
      return !stopping;
    };
    while (!stopping) {
      const int limit_ms = posted.empty() ? poller.limit_ms() : 0;
      lock.unlock();
      poller.wait(limit_ms);
      lock.lock();
      if (!stopping) poller.run_due(run_unlocked);
      run_posted(lock);
    }
    // A thread may be blocked in post_and_wait, so posted callbacks run even now.
    while (!posted.empty()) run_posted(lock);
    current = nullptr;
  }

  std::thread thread;
};

thread_local const EventLoop::Impl* EventLoop::Impl::current = nullptr;

EventLoop::EventLoop(const char* name) : impl_(std::make_shared<Impl>()) {
  impl_->thread = start_thread("events of the network", [impl = impl_] { impl->run(); });
  ::pthread_setname_np(impl_->thread.native_handle(), std::string(name).substr(0, 15).c_str());
}

EventLoop::~EventLoop() {
  if (!guard_.owned()) {
    abandon(impl_);
    return;
  }
  {
    const MutexLock lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->ring();
  if (inside()) {
    // The last owner was a callback of this loop. The thread ends by itself once that callback returns.
    impl_->thread.detach();
  } else {
    impl_->thread.join();
  }
}

namespace {

struct SharedLoop {
  Mutex mutex;
  std::weak_ptr<EventLoop> loop MANIPLE_GUARDED_BY(mutex);
};
constinit ProcessWide<SharedLoop> shared_loop;

}  // namespace

std::shared_ptr<EventLoop> EventLoop::shared() {
  SharedLoop& mine = *shared_loop;
  const MutexLock lock(mine.mutex);
  std::shared_ptr<EventLoop> result = mine.loop.lock();
  if (!result) {
    result = std::make_shared<EventLoop>("maniple-net");
    mine.loop = result;
  }
  return result;
}

void EventLoop::add(int fd, std::uint32_t events, std::function<void(std::uint32_t)> ready,
                    std::function<void(const std::string&)> failed) {
  if (!guard_.owned()) return;
  if (!failed) failed = &Impl::note;
  const MutexLock lock(impl_->mutex);
  if (!impl_->poller.add(fd, events, std::move(ready), std::move(failed))) throw_system_error("epoll_ctl add", EPERM);
}

void EventLoop::modify(int fd, std::uint32_t events) {
  if (!guard_.owned()) return;
  const MutexLock lock(impl_->mutex);
  impl_->poller.modify(fd, events);
}

void EventLoop::remove(int fd) {
  if (!guard_.owned()) return;
  std::shared_ptr<Poller::Watch> removed;  // destroyed after the lock is released
  MutexLock lock(impl_->mutex);
  removed = impl_->poller.remove(fd);
  if (removed) impl_->await_not_running(lock, removed->token);
}

EventLoop::Timer EventLoop::call_at(Deadline when, std::function<void()> callback) {
  Timer timer = 0;
  if (!guard_.owned()) return timer;
  {
    const MutexLock lock(impl_->mutex);
    timer = impl_->poller.call_at(when, std::move(callback));
  }
  if (!inside()) impl_->ring();
  return timer;
}

void EventLoop::cancel(Timer timer) {
  if (!guard_.owned()) return;
  std::function<void()> removed;  // destroyed after the lock is released
  MutexLock lock(impl_->mutex);
  removed = impl_->poller.take(timer);
  impl_->await_not_running(lock, timer);
}

void EventLoop::post(std::function<void()> callback) {
  if (!guard_.owned()) return;
  {
    const MutexLock lock(impl_->mutex);
    impl_->posted.push_back(std::move(callback));
  }
  impl_->ring();
}

void EventLoop::post_and_wait(std::function<void()> callback) {
  if (!guard_.owned()) return;
  if (inside()) return callback();
  Mutex mutex;
  CondVar finished;
  bool done = false;
  std::exception_ptr error;
  post([&] {
    try {
      callback();
    } catch (...) {
      error = std::current_exception();
    }
    const MutexLock lock(mutex);
    done = true;
    finished.notify_all();
  });
  MutexLock lock(mutex);
  finished.wait(lock, [&] { return done; });
  if (error) std::rethrow_exception(error);
}

bool EventLoop::inside() const noexcept { return Impl::current == impl_.get(); }

}  // namespace maniple
