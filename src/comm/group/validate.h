// Turns a call's arguments into an Operation, or throws InvalidArgument that names the mistake.
#pragma once

#include <span>
#include <vector>

#include "comm/call/operation.h"
#include <maniple/comm/process_group.h>

namespace maniple {

struct GroupShape {
  int rank;
  int size;
};

inline Device device_of(const PointToPoint& p2p) { return p2p.op == Op::send ? p2p.out.device : p2p.in.device; }

/// Requires a valid dtype, at most 2^48 bytes, and a non-null buffer unless the count is 0.
void require_memory(Op op, const char* what, ConstBuffer buffer);

/// For calls with several buffers: requires that no written buffer overlaps another.
struct UsedMemory {
  const void* data;
  std::size_t bytes;
  bool written;
};
void require_apart(const char* call, std::vector<UsedMemory> extents);

/// Throws if `limit` is negative or NaN; `what` names it ("a time-out").
void require_limit(const char* what, Seconds limit);

/// Throws if `kind` is not an enumerator of TransportKind.
void require_transport(TransportKind kind);

Operation broadcast_operation(GroupShape group, Buffer buffer, int root, const CallOptions& call);
Operation reduce_operation(GroupShape group, ConstBuffer input, Buffer output, int root, ReduceOp op,
                           const CallOptions& call);
Operation all_reduce_operation(GroupShape group, ConstBuffer input, Buffer output, ReduceOp op,
                               const CallOptions& call);
Operation gather_operation(GroupShape group, ConstBuffer input, Buffer output, int root,
                           std::span<const std::size_t> counts, const CallOptions& call);
Operation all_gather_operation(GroupShape group, ConstBuffer input, Buffer output, std::span<const std::size_t> counts,
                               const CallOptions& call);
Operation scatter_operation(GroupShape group, ConstBuffer input, Buffer output, int root,
                            std::span<const std::size_t> counts, const CallOptions& call);
Operation reduce_scatter_operation(GroupShape group, ConstBuffer input, Buffer output, ReduceOp op,
                                   std::span<const std::size_t> counts, const CallOptions& call);
Operation all_to_all_operation(GroupShape group, ConstBuffer input, Buffer output,
                               std::span<const std::size_t> input_counts, std::span<const std::size_t> output_counts,
                               const CallOptions& call);
Operation barrier_operation(const CallOptions& call);

}  // namespace maniple
