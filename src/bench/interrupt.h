// Ctrl-C and its kin as a readable descriptor, so that everything that was started is ended and removed in the ordinary
// way, by destructors.
#pragma once

#include <csignal>

#include "base/unique_fd.h"

namespace maniple::bench {

/// Thrown where the signal is noticed; not an Error, because nothing went wrong.
struct Interrupted {
  int signal;
};

/// Blocks SIGINT, SIGTERM and SIGHUP for the process while it lives. Make it before any thread.
class InterruptWatch {
 public:
  InterruptWatch();
  ~InterruptWatch();
  InterruptWatch(const InterruptWatch&) = delete;
  InterruptWatch& operator=(const InterruptWatch&) = delete;

  int fd() const noexcept { return fd_.get(); }
  void throw_if_signalled() const;  ///< Interrupted

 private:
  sigset_t before_;
  UniqueFd fd_;
};

}  // namespace maniple::bench
