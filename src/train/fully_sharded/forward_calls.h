// The forward calls of units whose graphs exist, found by the autograd nodes that they created.
//
// A backward normally reaches a unit through ResultsOf, which gathers it. A tensor that left forward in another way (as
// a member of the module, through a captured variable) leads past ResultsOf to nodes that need the unit's parameters.
// Therefore LibTorch notifies ForwardCalls before it runs a node of any backward, and the calls that created the node
// gather first. A call created the nodes that its thread numbered between its begin and its end. Calls nest.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>

#include "train/tensor/torch_compat.h"

namespace maniple::detail {

class GatheredBy;

struct ForwardCall {
  explicit ForwardCall(const NodePointer<GatheredBy>& given);
  bool open() const noexcept { return end == std::numeric_limits<std::uint64_t>::max(); }

  WeakNodePointer<GatheredBy> node;
  std::uint64_t thread = 0;
  std::uint64_t begin = 0, end = std::numeric_limits<std::uint64_t>::max();  ///< sequence numbers of its nodes
  std::shared_ptr<ForwardCall> outer = nullptr;                              ///< the call around it, if any
};

/// Threads: any thread may call these functions; begin and end of a call are in one thread.
class ForwardCalls {
 public:
  static std::shared_ptr<ForwardCall> begin(const NodePointer<GatheredBy>& node);
  /// Of the call that this thread began last.
  static void end(ForwardCall& call) noexcept;
  /// The graph of the call is gone.
  static void remove(const ForwardCall& call) noexcept;
};

}  // namespace maniple::detail
