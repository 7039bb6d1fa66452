#include "net/event_loop.h"

#include <pthread.h>

#include <cerrno>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "base/system_error.h"
#include "base/threads.h"
#include "base/unique_fd.h"

namespace maniple {

// Descriptors and timers are known by tokens that are never used twice, so that an event of a descriptor that was
// closed and opened again as something else cannot reach the wrong callback.
struct EventLoop::Impl {
  using Token = std::uint64_t;
  static constexpr Token kWake = 0;

  struct Watch {
    int fd;
    std::function<void(std::uint32_t)> ready;
    std::function<void(const std::string&)> failed;
  };
  struct Alarm {
    Token token;
    std::function<void()> callback;
  };

  UniqueFd epoll = new_descriptor("epoll_create1", [] { return ::epoll_create1(EPOLL_CLOEXEC); });
  UniqueFd wake = new_event();

  std::mutex mutex;
  std::condition_variable idle;  // `running` has changed
  Token next_token = 1;
  Token running = 0;  // whose callback is being run
  bool stopping = false;
  std::unordered_map<Token, std::shared_ptr<Watch>> watches;
  std::unordered_map<int, Token> token_of_fd;
  std::multimap<Deadline, Alarm> alarms;
  std::vector<std::function<void()>> posted;

  static thread_local const Impl* current;

  void ring() {
    const std::uint64_t one = 1;
    const auto written = ::write(wake.get(), &one, sizeof(one));
    (void)written;  // full means it is ringing already
  }

  void await_not_running(std::unique_lock<std::mutex>& lock, Token token) {
    if (current != this) idle.wait(lock, [&] { return running != token; });
  }

  // An exception must not leave the loop's thread, which would end the process with all its groups. Returns its text.
  template <class Callback>
  static std::string guarded(Callback&& callback) {
    try {
      callback();
      return {};
    } catch (const std::exception& error) {
      return *error.what() != '\0' ? error.what() : "an exception without a text";
    } catch (...) {
      return "an exception of unknown type";
    }
  }

  static void note(const std::string& failure) {
    if (!failure.empty()) log_line(LogLevel::error, "a callback of the event loop failed: " + failure);
  }

  template <class Callback>
  void run_unlocked(std::unique_lock<std::mutex>& lock, Token token, Callback&& callback) {
    running = token;
    lock.unlock();
    note(guarded(callback));
    lock.lock();
    running = 0;
    idle.notify_all();
  }

  // Left in the loop, a descriptor whose callback throws would be ready again at once.
  void unwatch(Token token) {
    const auto found = watches.find(token);
    if (found == watches.end()) return;  // its owner removed it
    ::epoll_ctl(epoll.get(), EPOLL_CTL_DEL, found->second->fd, nullptr);
    token_of_fd.erase(found->second->fd);
    watches.erase(found);
  }

  void run_watch(Token token, Watch& watch, std::uint32_t events) {
    const std::string failure = guarded([&] { watch.ready(events); });
    if (failure.empty()) return;
    if (watch.failed) {
      note(guarded([&] { watch.failed(failure); }));
    } else {
      note(failure);
    }
    const std::lock_guard lock(mutex);
    unwatch(token);
  }

  void run_posted(std::unique_lock<std::mutex>& lock) {
    std::vector<std::function<void()>> batch;
    batch.swap(posted);
    lock.unlock();
    for (auto& callback : batch) note(guarded(callback));
    batch.clear();
    lock.lock();
  }

  void run_alarms(std::unique_lock<std::mutex>& lock) {
    const auto now = Deadline::Clock::now();
    while (!alarms.empty() && alarms.begin()->first.when() <= now) {
      Alarm alarm = std::move(alarms.begin()->second);
      alarms.erase(alarms.begin());
      run_unlocked(lock, alarm.token, alarm.callback);
    }
  }

  void run_ready(std::unique_lock<std::mutex>& lock, const epoll_event& event) {
    const std::uint64_t key =
        event.data.u64;  // a copy: the struct is packed on x86-64, so its fields cannot be referred to
    if (key == kWake) {
      std::uint64_t count = 0;
      const auto got = ::read(wake.get(), &count, sizeof(count));
      (void)got;
      return;
    }
    const auto found = watches.find(key);
    if (found == watches.end()) return;  // removed by an earlier callback of this round
    // The callback may remove itself; its function object must outlive the call.
    std::shared_ptr<Watch> watch = found->second;
    const std::uint32_t events = event.events;
    run_unlocked(lock, key, [&] { run_watch(key, *watch, events); });
    lock.unlock();
    watch.reset();  // may run destructors that call back into the loop
    lock.lock();
  }

  void run() {
    current = this;
    epoll_event events[64];
    std::unique_lock lock(mutex);
    while (!stopping) {
      const Deadline next = alarms.empty() ? Deadline::never() : alarms.begin()->first;
      const int limit_ms = posted.empty() ? next.poll_ms() : 0;
      lock.unlock();
      const int count = ::epoll_wait(epoll.get(), events, std::size(events), limit_ms);
      lock.lock();
      for (int i = 0; i < count && !stopping; ++i) run_ready(lock, events[i]);
      if (!stopping) run_alarms(lock);
      run_posted(lock);
    }
    // Somebody may be in post_and_wait: what was posted is run, even late.
    while (!posted.empty()) run_posted(lock);
    current = nullptr;
  }

  std::thread thread;
};

thread_local const EventLoop::Impl* EventLoop::Impl::current = nullptr;

EventLoop::EventLoop(const char* name) : impl_(std::make_shared<Impl>()) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = Impl::kWake;
  if (::epoll_ctl(impl_->epoll.get(), EPOLL_CTL_ADD, impl_->wake.get(), &event) != 0) throw_system_error("epoll_ctl");
  impl_->thread = start_thread("events of the network", [impl = impl_] { impl->run(); });
  ::pthread_setname_np(impl_->thread.native_handle(), std::string(name).substr(0, 15).c_str());
}

EventLoop::~EventLoop() {
  if (!guard_.owned()) {
    abandon(impl_);
    return;
  }
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->ring();
  if (inside()) {
    // The last owner was a callback of this very loop. The thread ends by itself once that callback returns.
    impl_->thread.detach();
  } else {
    impl_->thread.join();
  }
}

namespace {

struct SharedLoop {
  std::mutex mutex;
  std::weak_ptr<EventLoop> loop;
};
constinit ProcessWide<SharedLoop> shared_loop;

}  // namespace

std::shared_ptr<EventLoop> EventLoop::shared() {
  SharedLoop& mine = *shared_loop;
  const std::lock_guard lock(mine.mutex);
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
  const std::lock_guard lock(impl_->mutex);
  MANIPLE_ASSERT(impl_->token_of_fd.count(fd) == 0);
  const Impl::Token token = impl_->next_token++;
  epoll_event event{};
  event.events = events;
  event.data.u64 = token;
  if (::epoll_ctl(impl_->epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) throw_system_error("epoll_ctl add");
  impl_->watches.emplace(token, std::make_shared<Impl::Watch>(Impl::Watch{fd, std::move(ready), std::move(failed)}));
  impl_->token_of_fd.emplace(fd, token);
}

void EventLoop::modify(int fd, std::uint32_t events) {
  if (!guard_.owned()) return;
  const std::lock_guard lock(impl_->mutex);
  const auto found = impl_->token_of_fd.find(fd);
  if (found == impl_->token_of_fd.end()) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = found->second;
  if (::epoll_ctl(impl_->epoll.get(), EPOLL_CTL_MOD, fd, &event) != 0) throw_system_error("epoll_ctl modify");
}

void EventLoop::remove(int fd) {
  if (!guard_.owned()) return;
  std::shared_ptr<Impl::Watch> removed;  // destroyed after the lock is released
  std::unique_lock lock(impl_->mutex);
  const auto found = impl_->token_of_fd.find(fd);
  if (found == impl_->token_of_fd.end()) return;
  const Impl::Token token = found->second;
  impl_->token_of_fd.erase(found);
  const auto watch = impl_->watches.find(token);
  removed = std::move(watch->second);
  impl_->watches.erase(watch);
  ::epoll_ctl(impl_->epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
  impl_->await_not_running(lock, token);
}

EventLoop::Timer EventLoop::call_at(Deadline when, std::function<void()> callback) {
  Timer token = 0;
  if (!guard_.owned()) return token;
  {
    const std::lock_guard lock(impl_->mutex);
    token = impl_->next_token++;
    impl_->alarms.emplace(when, Impl::Alarm{token, std::move(callback)});
  }
  if (!inside()) impl_->ring();
  return token;
}

void EventLoop::cancel(Timer timer) {
  if (!guard_.owned()) return;
  std::function<void()> removed;
  std::unique_lock lock(impl_->mutex);
  for (auto alarm = impl_->alarms.begin(); alarm != impl_->alarms.end(); ++alarm) {
    if (alarm->second.token != timer) continue;
    removed = std::move(alarm->second.callback);
    impl_->alarms.erase(alarm);
    break;
  }
  impl_->await_not_running(lock, timer);
}

void EventLoop::post(std::function<void()> callback) {
  if (!guard_.owned()) return;
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->posted.push_back(std::move(callback));
  }
  impl_->ring();
}

void EventLoop::post_and_wait(std::function<void()> callback) {
  if (!guard_.owned()) return;
  if (inside()) return callback();
  std::mutex mutex;
  std::condition_variable finished;
  bool done = false;
  std::exception_ptr error;
  post([&] {
    try {
      callback();
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex);
    done = true;
    finished.notify_all();
  });
  std::unique_lock lock(mutex);
  finished.wait(lock, [&] { return done; });
  if (error) std::rethrow_exception(error);
}

bool EventLoop::inside() const noexcept { return Impl::current == impl_.get(); }

}  // namespace maniple
