#include "comm/session/peer_dialer.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cerrno>

#include <fmt/format.h>

#include "comm/base/files.h"
#include "comm/net/address.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

constexpr std::chrono::milliseconds kHandshakeGrace{200};

}  // namespace

PeerDialer::PeerDialer(Task task) : task_(std::move(task)), cancel_(new_event()) {
  thread_ = std::thread([this] {
    run();
    finished_.set_value();
  });
  ::pthread_setname_np(thread_.native_handle(), "maniple-dial");
}

PeerDialer::~PeerDialer() {
  auto finished = finished_.get_future();
  if (!dialling_ || finished.wait_for(kHandshakeGrace) != std::future_status::ready) ::eventfd_write(cancel_.get(), 1);
  thread_.join();
}

void PeerDialer::run() {
  pollfd wake{cancel_.get(), POLLIN, 0};
  if (task_.delay.count() > 0 && ::poll(&wake, 1, Deadline::after(task_.delay).poll_ms()) > 0) return;
  Result result;
  try {
    dialling_ = true;
    result.connection = task_.dial(Deadline::after(task_.limit), cancel_.get());
  } catch (const Aborted&) {
    return;
  } catch (const SystemError& error) {
    result.refused = error.code() == ECONNREFUSED;
    result.why = error.what();
  } catch (const std::exception& error) {
    result.why = error.what();
  }
  task_.done(std::move(result));
}

char process_state(int pid) {
  const std::string line = file_text(fmt::format("/proc/{}/stat", pid));
  const auto end = line.rfind(')');  // the name in parentheses may contain any character
  return end != std::string::npos && end + 2 < line.size() ? line[end + 2] : '\0';
}

void ListenProbes::start(int key, const Address& address, std::function<void()> refused) {
  if (open_.count(key) != 0) return;
  UniqueFd fd;
  try {
    fd = open_stream_socket(address.family(), "checking whether a rank is there");
  } catch (const SystemError&) {
    return;  // out of descriptors: the result is unknown
  }
  const int result = ::connect(fd.get(), address.get(), address.length());
  if (result == 0) return;
  if (errno == ECONNREFUSED) return refused();
  if (errno != EINPROGRESS) return;
  const int number = fd.get();
  open_[key] = std::move(fd);
  loop_->add(number, EPOLLOUT, [this, key, refused = std::move(refused)](std::uint32_t) { finish(key, refused); });
}

void ListenProbes::finish(int key, const std::function<void()>& refused) {
  const auto it = open_.find(key);
  if (it == open_.end()) return;
  const UniqueFd fd = std::move(it->second);
  open_.erase(it);
  int code = 0;
  socklen_t length = sizeof code;
  ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &code, &length);
  const auto keep = refused;  // removing the descriptor destroys the callback that holds it
  loop_->remove(fd.get());
  if (code == ECONNREFUSED) keep();
}

void ListenProbes::stop() {
  for (const auto& [key, fd] : open_) loop_->remove(fd.get());
  open_.clear();
}

}  // namespace maniple
