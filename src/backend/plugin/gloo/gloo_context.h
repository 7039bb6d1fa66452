// Gloo's context of a group, with one deadline for an operation and an end that can be called from outside.
//
// Gloo gives its timeout to every single wait of a collective, and nothing but that timeout ends a wait on a living peer. Here
// the transport hands out buffers of our own, which wrap Gloo's: their waits last until the deadline of the operation, or until
// `interrupt`, and then throw GivenUp through Gloo's code.
#pragma once

#include <gloo/rendezvous/context.h>

#include <memory>
#include <mutex>

#include "backend/plugin/plugin.h"

namespace maniple::gloo_engine {

/// Not an error of its own: the plugin returns false and its owner says why.
struct GivenUp {};

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
  gloo::transport::UnboundBuffer* waiting_ = nullptr;  // the buffer that a wait is under way on: there is one at a time
};

}  // namespace maniple::gloo_engine
