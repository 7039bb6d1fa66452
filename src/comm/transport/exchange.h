// The frames that group members exchange during one collective: post sends and receives, wait for them in any order.
//
// Frames between the same two ranks arrive in the order posted (see frame.h). A frame whose signature differs from this
// call's is a Mismatch, whose error describes both calls; so is a frame whose length differs from the posted one.
//
// A frame without payload still has its header, so ranks that exchange no data compare their calls, too.
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
  /// `members` are the participating ranks of the mesh, this rank included; their order defines rank().
  Exchange(Mesh& mesh, std::span<const int> members, const Signature& signature, Deadline deadline);
  ~Exchange();

  int rank() const noexcept;
  int size() const noexcept;

  using Ticket = std::uint32_t;
  Ticket send(int peer, std::span<const std::byte> bytes);
  Ticket recv(int peer, std::span<std::byte> bytes);

  /// Makes progress on all transfers until the ticket's is complete. Throws Timeout naming the peers still awaited and
  /// the bytes received, PeerLost, Mismatch, ProtocolError, or the abort's cause.
  void wait(Ticket ticket);
  void wait_all();

  /// Makes progress without waiting: call it between pieces of arithmetic.
  void progress();

  /// Memory for intermediate results, owned by the mesh and reused by later calls. Contents are undefined; only one may
  /// be in use.
  std::span<std::byte> scratch(std::size_t bytes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace maniple
