#include "rendezvous/init_notice.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cstdlib>

#include <fmt/format.h>

namespace maniple {
namespace {

/// A number of the environment that a launcher set; -1: there is none.
int number_of(const char* name) noexcept {
  const char* text = std::getenv(name);
  if (text == nullptr || *text < '0' || *text > '9') return -1;
  return std::atoi(text);
}

// Not worth a failure: without it, the others wait for the time-out of init().
void notify(const char* stage) noexcept {
  const int fd = number_of("MANIPLE_INIT_FD");
  const int rank = number_of("RANK");
  if (fd < 0 || rank < 0) return;
  char text[64];
  const auto end = fmt::format_to_n(text, sizeof text, "{} {}", stage, rank);
  ::send(fd, text, end.size, MSG_NOSIGNAL | MSG_DONTWAIT);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);  // not for this process's own children
}

}  // namespace

void notify_init_started(int world_size) noexcept {
  if (world_size <= 0 || world_size == number_of("WORLD_SIZE")) notify("joining");
}

void notify_init_done() noexcept { notify("joined"); }

}  // namespace maniple
