#include "process/poller.h"

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/system_error.h"

namespace maniple::launch {

Poller::Poller() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) throw_system_error("epoll_create1");
}

bool Poller::watch(int fd, std::uint32_t events, std::function<void(std::uint32_t)> ready) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    if (errno == EPERM) return false;
    throw_system_error("epoll_ctl");
  }
  entries_[fd] = std::make_shared<Entry>(Entry{std::move(ready)});
  return true;
}

void Poller::modify(int fd, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0) throw_system_error("epoll_ctl");
}

void Poller::forget(int fd) {
  const auto found = entries_.find(fd);
  if (found == entries_.end()) return;
  found->second->gone = true;
  entries_.erase(found);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

Poller::Timer Poller::call_after(std::chrono::duration<double> delay, std::function<void()> call) {
  const auto when = Clock::now() + std::chrono::duration_cast<Clock::duration>(delay);
  const Timer timer = next_timer_++;
  timers_.emplace(std::pair(when, timer), std::move(call));
  return timer;
}

void Poller::cancel(Timer& timer) {
  const auto found =
      std::find_if(timers_.begin(), timers_.end(), [&](const auto& entry) { return entry.first.second == timer; });
  if (found != timers_.end()) timers_.erase(found);
  timer = 0;
}

void Poller::run_timers() {
  const auto now = Clock::now();
  while (!timers_.empty() && timers_.begin()->first.first <= now) {
    const auto call = std::move(timers_.begin()->second);
    timers_.erase(timers_.begin());
    call();
  }
}

void Poller::turn() {
  int wait_ms = -1;
  if (!timers_.empty()) {
    constexpr long long kLongest = 60'000;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(timers_.begin()->first.first - Clock::now()).count();
    wait_ms = static_cast<int>(std::clamp<long long>(left, 0, kLongest));
  }
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), wait_ms);
  if (count < 0 && errno != EINTR) throw_system_error("epoll_wait");
  for (int i = 0; i < count; ++i) {
    const auto found = entries_.find(events[static_cast<std::size_t>(i)].data.fd);
    if (found == entries_.end()) continue;
    const std::shared_ptr<Entry> entry = found->second;  // it may forget itself
    if (!entry->gone) entry->ready(events[static_cast<std::size_t>(i)].events);
  }
  run_timers();
}

}  // namespace maniple::launch
