#include "bench/interrupt.h"

#include <sys/signalfd.h>

#include "base/system_error.h"

namespace maniple::bench {

InterruptWatch::InterruptWatch() {
  sigset_t watched;
  sigemptyset(&watched);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&watched, signal);
  if (sigprocmask(SIG_BLOCK, &watched, &before_) != 0) throw_system_error("sigprocmask");
  fd_.reset(signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) throw_system_error("signalfd");
}

InterruptWatch::~InterruptWatch() { sigprocmask(SIG_SETMASK, &before_, nullptr); }

void InterruptWatch::throw_if_signalled() const {
  signalfd_siginfo info;
  if (read(fd_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    throw Interrupted{static_cast<int>(info.ssi_signo)};
  }
}

}  // namespace maniple::bench
