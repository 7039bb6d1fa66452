#include "spawn/parent_pipe.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <mutex>
#include <vector>

#include <fmt/format.h>

#include "base/system_error.h"
#include "process/descriptors.h"

namespace maniple::launch {
namespace {

struct Open {
  std::mutex mutex;
  std::vector<int> writing;
};

// Never destroyed: handles may live as long as the process.
Open& open_parent_pipes() {
  static Open& open = *new Open;
  return open;
}

void close_in_forked_child() {
  Open& open = open_parent_pipes();
  for (const int fd : open.writing) ::close(fd);
  open.writing.clear();
  open.mutex.unlock();
}

void watch_forks() {
  static const int watched = ::pthread_atfork([] { open_parent_pipes().mutex.lock(); },
                                              [] { open_parent_pipes().mutex.unlock(); }, close_in_forked_child);
  (void)watched;
}

}  // namespace

ParentPipe::ParentPipe() {
  watch_forks();
  Open& open = open_parent_pipes();
  const std::lock_guard lock(open.mutex);
  auto [reading, writing] = make_pipe();
  open.writing.push_back(writing.get());
  writing_ = writing.release();
  reading_ = std::move(reading);
}

ParentPipe::~ParentPipe() {
  Open& open = open_parent_pipes();
  const std::lock_guard lock(open.mutex);
  const auto found = std::find(open.writing.begin(), open.writing.end(), writing_);
  if (found == open.writing.end()) return;  // in a child of fork(): closed already
  open.writing.erase(found);
  ::close(writing_);
}

void die_with_parent(int parent_pipe) {
  // Opened anew: who gets the signal belongs to the open file, and that is shared with the other children.
  const int own = ::open(fmt::format("/proc/self/fd/{}", parent_pipe).c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  const bool asked = own >= 0 && ::fcntl(own, F_SETOWN, ::getpid()) == 0 && ::fcntl(own, F_SETSIG, SIGKILL) == 0 &&
                     ::fcntl(own, F_SETFL, O_ASYNC | O_NONBLOCK) == 0;
  if (!asked) throw_system_error("spawn: asking to be killed with the parent");
  ::close(parent_pipe);
  // The parent may have ended before.
  pollfd state{own, POLLIN, 0};
  if (::poll(&state, 1, 0) > 0) ::raise(SIGKILL);
}

}  // namespace maniple::launch
