#include "launch/jobs/job_control.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <exception>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/log.h"
#include "comm/base/system_error.h"
#include "launch/jobs/job_list.h"
#include "launch/jobs/job_record.h"

namespace maniple::launch {
namespace {

constexpr std::size_t kMostBytes = 4096;
constexpr std::size_t kMostConnections = 16;
constexpr int kBacklog = 8;
constexpr int kAnswerSeconds = 10;

/// A path through the directory's descriptor: a socket's own path may be too long for sockaddr_un.
sockaddr_un address_in(const UniqueFd& directory, const std::string& name) {
  const std::string path = fmt::format("/proc/self/fd/{}/{}", directory.get(), name);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  MANIPLE_REQUIRE(path.size() < sizeof address.sun_path, "{} is too long a name for a socket", name);
  std::copy(path.begin(), path.end(), address.sun_path);
  return address;
}

const sockaddr* generic(const sockaddr_un& address) { return reinterpret_cast<const sockaddr*>(&address); }

bool is_own_user(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && (peer.uid == ::geteuid() || peer.uid == 0);
}

UniqueFd packet_socket(int flags) {
  UniqueFd made(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
  if (!made) throw_system_error("socket");
  return made;
}

/// Empty: nobody listens there.
UniqueFd connect_to(const std::string& job) {
  for (const std::string& path : job_directories()) {
    try {
      const UniqueFd directory = open_job_directory(path, false);
      const sockaddr_un address = address_in(directory, control_name(job));
      UniqueFd connection = packet_socket(0);
      if (::connect(connection.get(), generic(address), sizeof address) == 0 && is_own_user(connection.get()))
        return connection;
    } catch (const std::exception& error) {
      log_debug("no socket of job {} in {}: {}", job, path, error.what());
    }
  }
  return {};
}

}  // namespace

std::string control_name(const std::string& job) { return "control-" + job; }

JobControl::JobControl(Poller& poller, const std::string& job, Handler handler) noexcept
    : poller_(poller), handler_(std::move(handler)) {
  for (const std::string& path : job_directories()) {
    try {
      name_ = control_name(job);
      const UniqueFd directory = open_job_directory(path, true);
      const sockaddr_un address = address_in(directory, name_);
      listener_ = packet_socket(SOCK_NONBLOCK);
      if (::bind(listener_.get(), generic(address), sizeof address) != 0) throw_system_error("bind " + name_);
      directory_ = path;
      if (::listen(listener_.get(), kBacklog) != 0) throw_system_error("listen");
      poller_.add(listener_.get(), EPOLLIN, [this](std::uint32_t) { accept_all(); });
      return;
    } catch (const std::exception& error) {
      log_debug("no socket for requests to this job in {}: {}", path, error.what());
    }
  }
}

JobControl::~JobControl() {
  for (const auto& [fd, connection] : connections_) poller_.remove(fd);
  if (listener_) poller_.remove(listener_.get());
  if (directory_.empty() || !guard_.owned()) return;
  try {
    const UniqueFd directory = open_job_directory(directory_, false);
    ::unlinkat(directory.get(), name_.c_str(), 0);
  } catch (const std::exception& error) {
    log_debug("the socket for requests to this job stays in {}: {}", directory_, error.what());
  }
}

void JobControl::accept_all() {
  for (;;) {
    UniqueFd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!connection) return;
    if (!is_own_user(connection.get()) || connections_.size() >= kMostConnections) continue;
    const int fd = connection.get();
    connections_[fd] = std::move(connection);
    poller_.add(fd, EPOLLIN, [this, fd](std::uint32_t) { serve(fd); });
  }
}

void JobControl::serve(int fd) {
  char buffer[kMostBytes];
  const ssize_t got = ::recv(fd, buffer, sizeof buffer, 0);
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  poller_.remove(fd);
  const UniqueFd connection = std::move(connections_[fd]);
  connections_.erase(fd);
  if (got <= 0) return;
  const ControlAnswer answer = handler_(std::string_view(buffer, static_cast<std::size_t>(got)));
  const std::string text = (answer.accepted ? '1' : '0') + answer.text;
  if (::send(connection.get(), text.data(), text.size(), MSG_NOSIGNAL) < 0)
    log_debug("a request's answer was not sent: {}", errno_text(errno));
}

ControlAnswer ask_job(const std::string& job, std::string_view request) {
  const std::vector<JobInfo> jobs = running_jobs();
  const auto found = std::find_if(
      jobs.begin(), jobs.end(), [&](const JobInfo& info) { return info.id == job || std::to_string(info.pid) == job; });
  MANIPLE_REQUIRE(found != jobs.end(), "no job \"{}\" runs here; `maniple ps` lists them", job);
  const UniqueFd connection = connect_to(found->id);
  MANIPLE_REQUIRE(connection,
                  "job {} takes no requests here: it was not started with --elastic, or node 0 is another host",
                  found->id);
  const timeval limit{.tv_sec = kAnswerSeconds, .tv_usec = 0};
  ::setsockopt(connection.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  const auto has_ended = [] { return errno == EPIPE || errno == ECONNRESET; };
  const bool sent = ::send(connection.get(), request.data(), request.size(), MSG_NOSIGNAL) >= 0;
  if (!sent && !has_ended()) throw_system_error("send");
  char buffer[kMostBytes];
  ssize_t got = 0;
  do got = ::recv(connection.get(), buffer, sizeof buffer, 0);
  while (got < 0 && errno == EINTR);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
    throw Timeout(fmt::format("job {} has not answered for {} s", found->id, kAnswerSeconds), {}, 0);
  if (got < 0 && !has_ended()) throw_system_error("recv");
  MANIPLE_REQUIRE(got > 0, "job {} has ended", found->id);
  return {.accepted = buffer[0] == '1', .text = std::string(buffer + 1, static_cast<std::size_t>(got) - 1)};
}

}  // namespace maniple::launch
