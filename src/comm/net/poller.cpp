#include "comm/net/poller.h"

#include <cerrno>
#include <exception>

#include "comm/base/check.h"
#include "comm/base/system_error.h"

namespace maniple {

Poller::Poller() : epoll_(new_descriptor("epoll_create1", [] { return ::epoll_create1(EPOLL_CLOEXEC); })) {}

bool Poller::add(int fd, std::uint32_t events, std::function<void(std::uint32_t)> ready,
                 std::function<void(const std::string&)> failed) {
  MANIPLE_ASSERT(token_of_fd_.count(fd) == 0);
  const Token token = next_token_++;
  epoll_event event{};
  event.events = events;
  event.data.u64 = token;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    if (errno == EPERM) return false;
    throw_system_error("epoll_ctl add");
  }
  watches_.emplace(token, std::make_shared<Watch>(Watch{token, fd, std::move(ready), std::move(failed)}));
  token_of_fd_.emplace(fd, token);
  return true;
}

void Poller::modify(int fd, std::uint32_t events) {
  const auto found = token_of_fd_.find(fd);
  if (found == token_of_fd_.end()) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = found->second;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0) throw_system_error("epoll_ctl modify");
}

std::shared_ptr<Poller::Watch> Poller::remove(int fd) {
  const auto found = token_of_fd_.find(fd);
  if (found == token_of_fd_.end()) return nullptr;
  auto watch = watches_.extract(found->second);
  token_of_fd_.erase(found);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  return std::move(watch.mapped());
}

Poller::Timer Poller::call_at(Deadline when, std::function<void()> callback) {
  const Timer timer = next_token_++;
  alarms_.emplace(when, Alarm{timer, std::move(callback)});
  return timer;
}

std::function<void()> Poller::take(Timer timer) {
  for (auto alarm = alarms_.begin(); alarm != alarms_.end(); ++alarm) {
    if (alarm->second.token != timer) continue;
    auto callback = std::move(alarm->second.callback);
    alarms_.erase(alarm);
    return callback;
  }
  return {};
}

void Poller::turn() {
  if (!wait(limit_ms())) throw_system_error("epoll_wait");
  run_due([](Token, const auto& callback) {
    callback();
    return true;
  });
}

int Poller::limit_ms() const { return alarms_.empty() ? -1 : alarms_.begin()->first.poll_ms(); }

bool Poller::wait(int limit_ms) noexcept {
  const int count = ::epoll_wait(epoll_.get(), events_.data(), static_cast<int>(events_.size()), limit_ms);
  event_count_ = count > 0 ? count : 0;
  return count >= 0 || errno == EINTR;
}

std::string current_exception_text() {
  try {
    throw;
  } catch (const std::exception& error) {
    return *error.what() != '\0' ? error.what() : "an exception without a text";
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace maniple
