// Gloo writes to sockets as to files, so a peer that is gone costs a SIGPIPE, which ends the process. While this lives, the
// calling thread gets no SIGPIPE, nor do threads that it starts; the write then fails with an error that Gloo throws. What the
// rest of the program does about SIGPIPE is left alone.
#pragma once

#include <pthread.h>

#include <csignal>
#include <ctime>

namespace maniple::gloo_engine {

class NoBrokenPipe {
 public:
  NoBrokenPipe() noexcept {
    sigset_t pending;
    ::sigemptyset(&pipe_);
    ::sigaddset(&pipe_, SIGPIPE);
    ::sigpending(&pending);
    was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
    ::pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoBrokenPipe() {
    const timespec at_once{0, 0};
    if (!was_pending_)
      ::sigtimedwait(&pipe_, nullptr, &at_once);  // one that came meanwhile must not be delivered later
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoBrokenPipe(const NoBrokenPipe&) = delete;
  NoBrokenPipe& operator=(const NoBrokenPipe&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
  bool was_pending_ = false;
};

}  // namespace maniple::gloo_engine
