// From a call's arguments to an Operation, or an InvalidArgument that says what is wrong.
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

/// That the dtype is one, that there can be so many elements, and that there is memory for them.
void require_memory(Op op, const char* what, ConstBuffer buffer);

/// Of calls with several buffers: that nothing which is written overlaps another of them.
struct UsedMemory {
  const void* data;
  std::size_t bytes;
  bool written;
};
void require_apart(const char* call, std::vector<UsedMemory> extents);

/// "a time-out" of less than nothing, or NaN.
void require_limit(const char* what, Seconds limit);

/// A number that is none of TransportKind's values.
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
