// The frames that the ranks of a group exchange during one collective: post sends and receives, wait for them in any
// order.
//
// Frames between the same two ranks arrive in the order posted (see frame.h). One whose signature is not that of this
// call is a Mismatch (both calls are described), one whose length is not the posted one likewise.
//
// A frame without payload still has its header: that is how ranks that exchange no data compare what they called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/base/abort_signal.h"
#include "comm/call/signature.h"
#include <maniple/comm/deadline.h>

namespace maniple {

class Mesh;

class Exchange {
 public:
  /// `members` are the ranks of the mesh that take part, in the order that defines rank() here; this rank is among
  /// them.
  Exchange(Mesh& mesh, std::span<const int> members, const Signature& signature, Deadline deadline);
  ~Exchange();

  int rank() const noexcept;
  int size() const noexcept;

  using Ticket = std::uint32_t;
  Ticket send(int peer, std::span<const std::byte> bytes);
  Ticket recv(int peer, std::span<std::byte> bytes);

  /// Moves everything that can move until the ticket's transfer is complete. Throws Timeout naming the peers still
  /// awaited and the bytes received, PeerLost, Mismatch, ProtocolError, or the abort's cause.
  void wait(Ticket ticket);
  void wait_all();

  /// Moves what can move now, without waiting: call between pieces of arithmetic.
  void progress();

  /// Memory for intermediate results, kept by the mesh from call to call. Contents are undefined. One at a time.
  std::span<std::byte> scratch(std::size_t bytes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace maniple
