// Gloo's context of a group, with one deadline for an operation and an end that can be called from outside.
//
// Gloo gives its timeout to every single wait of a collective, and nothing but that timeout ends a wait on a living peer. Here
// the transport hands out buffers of our own, which wrap Gloo's: their waits last until the deadline of the operation, or until
// `interrupt`, and then throw GivenUp through Gloo's code.
#pragma once

#include <pthread.h>
#include <gloo/rendezvous/context.h>

#include <csignal>
#include <ctime>
#include <memory>
#include <mutex>

#include "backend/plugin/plugin.h"

namespace maniple::gloo_plugin {

/// Not an error of its own: the plugin returns false and its owner says why.
struct GivenUp {};

/// Gloo writes to sockets as to files, so a peer that is gone costs a SIGPIPE, which ends the process. While this lives, the
/// calling thread gets no SIGPIPE, nor do threads that it starts; the write then fails with an error that Gloo throws. What the
/// rest of the program does about SIGPIPE is left alone.
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
      ::sigtimedwait(&pipe_, nullptr, &at_once);  // one that was raised meanwhile must not be delivered later
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoBrokenPipe(const NoBrokenPipe&) = delete;
  NoBrokenPipe& operator=(const NoBrokenPipe&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
  bool was_pending_ = false;
};

class LimitedContext final : public gloo::rendezvous::Context {
 public:
  explicit LimitedContext(const PluginContext& context);

  /// Connects to every other rank of the group.
  void connect(const PluginContext& context);

  void set_deadline(Deadline deadline) noexcept { deadline_ = deadline; }  ///< of the next collective
  void interrupt() noexcept;                                               ///< ends its waits, and all later ones

 private:
  class Transport;
  class Buffer;

  Deadline deadline_;
  std::mutex mutex_;
  bool interrupted_ = false;
  gloo::transport::UnboundBuffer* waiting_ = nullptr;  // the buffer that is being waited on: there is one at a time
};

}  // namespace maniple::gloo_plugin
