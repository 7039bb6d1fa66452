// Runs an operation of dist.h: now, or as a Work that writes the tensors back when it ends.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "comm/group/tensor_calls.h"
#include "train/tensor/device.h"
#include "train/tensor/staged.h"
#include <maniple/dist.h>

namespace maniple {

inline std::shared_ptr<ProcessGroup> group_of(const DistOptions& options) {
  return options.group ? options.group : get_default_group();
}

/// The group rank of a peer passed as `argument`. Throws InvalidArgument for a global rank outside the group; the group
/// detects other mistakes.
int group_rank_of(const ProcessGroup& group, PeerRank peer, const char* operation, const char* argument);

/// "rank 1", or "rank 1 of the group (global rank 3)" where the two differ.
std::string rank_text(const ProcessGroup& group, int group_rank);

inline CallOptions call_of(const DistOptions& options) {
  return {.timeout = options.timeout, .async_op = options.async_op, .where = options.where};
}

/// Keeps the tensors alive and writes them back before the Work is done.
inline Work finishing(const Work& work, Device device, std::vector<Staged> tensors) {
  if (!device.is_cpu()) return finish_on_device(work, device, std::move(tensors));
  return work.then([tensors = std::move(tensors)] {
    for (const Staged& tensor : tensors) tensor.write_back();
  });
}

/// Calls `start(options of the call)`, which returns a Work. The Work is already done, unless the options request an
/// asynchronous operation or the tensors are on a GPU.
template <class Start>
Work run_operation(const DistOptions& options, std::vector<Staged> tensors, Start&& start) {
  const auto group = group_of(options);
  const Device device = require_one_device(*group, tensors);
  const CallOptions call = call_of(options);
  if (!device.is_cpu()) return run_on_device(*group, device, call, std::move(tensors), start);
  Work work = start(call);
  if (options.async_op) return finishing(work, device, std::move(tensors));
  for (const Staged& tensor : tensors) tensor.write_back();
  return work;
}

/// For messages: options that name the current stream of the tensor's device.
inline CallOptions message_call(ProcessGroup& group, const std::vector<Staged>& tensors, const DistOptions& options) {
  CallOptions call = call_of(options);
  call.stream = current_stream_on(require_one_device(group, tensors));
  return call;
}

}  // namespace maniple
