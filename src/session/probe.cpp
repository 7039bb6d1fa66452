#include "session/probe.h"

#include <sys/socket.h>

#include <cerrno>
#include <fstream>

#include <fmt/format.h>

#include "net/open_socket.h"
#include <maniple/comm/error.h>

namespace maniple {

char process_state(int pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  std::getline(file, line);
  const auto end = line.rfind(')');  // the name in parentheses may hold anything
  return end != std::string::npos && end + 2 < line.size() ? line[end + 2] : '\0';
}

void Probes::start(int key, const Address& address, std::function<void()> refused) {
  if (open_.count(key) != 0) return;
  UniqueFd fd;
  try {
    fd = open_stream_socket(address.family(), "looking whether a rank is there");
  } catch (const SystemError&) {
    return;  // no descriptor left: nothing is known
  }
  const int result = ::connect(fd.get(), address.get(), address.length());
  if (result == 0) return;
  if (errno == ECONNREFUSED) return refused();
  if (errno != EINPROGRESS) return;
  const int number = fd.get();
  open_[key] = std::move(fd);
  loop_->add(number, EPOLLOUT, [this, key, refused = std::move(refused)](std::uint32_t) { finish(key, refused); });
}

void Probes::finish(int key, const std::function<void()>& refused) {
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

void Probes::stop() {
  for (const auto& [key, fd] : open_) loop_->remove(fd.get());
  open_.clear();
}

}  // namespace maniple
