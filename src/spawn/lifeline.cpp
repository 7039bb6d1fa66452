#include "spawn/lifeline.h"

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
Open& open_lifelines() {
  static Open& open = *new Open;
  return open;
}

void close_in_forked_child() {
  Open& open = open_lifelines();
  for (const int fd : open.writing) ::close(fd);
  open.writing.clear();
  open.mutex.unlock();
}

void watch_forks() {
  static const int watched = ::pthread_atfork([] { open_lifelines().mutex.lock(); },
                                              [] { open_lifelines().mutex.unlock(); }, close_in_forked_child);
  (void)watched;
}

}  // namespace

Lifeline::Lifeline() {
  watch_forks();
  Open& open = open_lifelines();
  const std::lock_guard lock(open.mutex);
  auto [reading, writing] = make_pipe();
  open.writing.push_back(writing.get());
  writing_ = writing.release();
  reading_ = std::move(reading);
}

Lifeline::~Lifeline() {
  Open& open = open_lifelines();
  const std::lock_guard lock(open.mutex);
  const auto found = std::find(open.writing.begin(), open.writing.end(), writing_);
  if (found == open.writing.end()) return;  // in a child of fork(): closed already
  open.writing.erase(found);
  ::close(writing_);
}

void hold_on_to(int lifeline) {
  // Opened anew: who is to be told belongs to the open file, and that is shared with the other children.
  const int own = ::open(fmt::format("/proc/self/fd/{}", lifeline).c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  const bool asked = own >= 0 && ::fcntl(own, F_SETOWN, ::getpid()) == 0 && ::fcntl(own, F_SETSIG, SIGKILL) == 0 &&
                     ::fcntl(own, F_SETFL, O_ASYNC | O_NONBLOCK) == 0;
  if (!asked) throw_system_error("spawn: asking to be killed with the parent");
  ::close(lifeline);
  // It may have gone before we asked.
  pollfd state{own, POLLIN, 0};
  if (::poll(&state, 1, 0) > 0) ::raise(SIGKILL);
}

}  // namespace maniple::launch
