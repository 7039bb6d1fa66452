// Reducing by slices: the common part of reduce_scatter, all_reduce and reduce in their direct form.
//
// Words: the buffer is cut into one *slice* for each rank, its owner; a slice is cut into *chunks*. Everyone sends the
// owner its *raw* chunks; the owner reduces each chunk over all ranks in rank order and sends the *reduced* one to the
// audience (none, the root, everyone). The audience's part of the pipeline runs `kLag` chunks behind: on every connection
// raw chunk t comes before reduced chunk t - kLag, so that both directions stay full while the owner reduces.
//
// Cost for a rank, n ranks, buffer of B bytes: sends (n-1)/n B raw, and (n-1)/n B reduced for an audience of everyone
// (B/n for the root); two steps of latency. Scratch: (n-1) (kLag+1) chunks.
#pragma once

#include "call/operation.h"
#include "collective/reduce/reduce.h"
#include "transport/exchange.h"

namespace maniple {

struct SliceWork {
  enum class Audience { none, root, everyone };

  const std::byte* in = nullptr;  ///< all slices
  Parts slices;
  Reduction reduction;
  std::byte* own = nullptr;  ///< where this rank's reduced slice goes; null: in scratch
  std::byte* all = nullptr;  ///< where the others' reduced slices go, if this rank is in the audience
  Audience audience = Audience::none;
  int root = 0;
};

/// Returns this rank's reduced slice when everything is in place. `own` may be this rank's slice of `in`, and `all` may
/// be `in`.
std::span<const std::byte> reduce_by_slices(Exchange& exchange, const SliceWork& work);

/// For small buffers: everyone in the audience gets all operands and reduces them itself, in rank order, in one step.
/// Cost: (n-1) B sent for an audience of everyone. Others give and get headers.
inline constexpr std::size_t kSmallReduceBytes = 16 << 10;
void reduce_at_once(Exchange& exchange, const Operation& operation, SliceWork::Audience audience);

}  // namespace maniple
