// The backend's operations on parts: gather, scatter, reduce_scatter, all_to_all. Also barriers, messages, coalesced
// calls and registered memory.
#include <algorithm>
#include <cstring>

#include <torch/csrc/utils/pybind.h>

#include "backend.h"
#include "calls.h"
#include "device.h"
#include "errors.h"

namespace maniple_torch {

using c10d::OpType;

WorkPointer Backend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const at::Tensor& input = only("gather", inputs);
  const int root = require_root("gather", options.rootRank);
  const Memory in = memory_of("gather", input, Use::in);
  Memory out = nothing_like(in);
  Operation operation;
  if (rank_ == root) {
    const Tensors& list = only("gather", outputs);
    require_ranks("gather", list.size());
    require_dtype("gather", input, list.front());
    out = memory_of("gather", list, Use::out);
    if (!out.equal || out.counts.front() != in.buffer.count)
      refuse("gather: the outputs must all be as large as the input, " + std::to_string(input.numel()) + " elements");
    if (!out.own) operation.finish = [out] { out.copy_back(); };
    operation.outputs = list;
  } else if (!outputs.empty() && !outputs.front().empty()) {
    refuse("gather: rank " + std::to_string(rank_) + " has a list of outputs, but the root is rank " +
           std::to_string(root));
  }
  operation.run = [in = in.buffer, out = out.buffer, root](maniple_group* group, const maniple_call* how,
                                                           maniple_work** work) {
    return maniple_gather(group, &in, &out, root, nullptr, how, work);
  };
  operation.tensors = {in.flat, out.flat};
  // The same size on all ranks, so that all ranks start the operation in the same way. Not required, but simpler to
  // reason about.
  const std::size_t bytes = bytes_of(in) * static_cast<std::size_t>(size_);
  return call(OpType::GATHER, "maniple:gather", bytes, options.timeout, std::move(operation));
}

WorkPointer Backend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  const at::Tensor& output = only("scatter", outputs);
  const int root = require_root("scatter", options.rootRank);
  const Memory out = memory_of("scatter", output, Use::out);
  Memory in = nothing_like(out);
  if (rank_ == root) {
    const Tensors& list = only("scatter", inputs);
    require_ranks("scatter", list.size());
    require_dtype("scatter", list.front(), output);
    in = memory_of("scatter", list, Use::in);
    if (!in.equal || in.counts.front() != out.buffer.count)
      refuse("scatter: the inputs must all be as large as the output, " + std::to_string(output.numel()) + " elements");
  } else if (!inputs.empty() && !inputs.front().empty()) {
    refuse("scatter: rank " + std::to_string(rank_) + " has a list of inputs, but the root is rank " +
           std::to_string(root));
  }
  Operation operation;
  operation.run = [in = in.buffer, out = out.buffer, root](maniple_group* group, const maniple_call* how,
                                                           maniple_work** work) {
    return maniple_scatter(group, &in, &out, root, nullptr, how, work);
  };
  if (!out.own) operation.finish = [out] { out.copy_back(); };
  operation.tensors = {in.flat, out.flat};
  operation.outputs = outputs;
  const std::size_t bytes = bytes_of(out) * static_cast<std::size_t>(size_);
  return call(OpType::SCATTER, "maniple:scatter", bytes, options.timeout, std::move(operation));
}

WorkPointer Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only("reduce_scatter", outputs);
  const Tensors& list = only("reduce_scatter", inputs);
  require_ranks("reduce_scatter", list.size());
  require_dtype("reduce_scatter", list.front(), output);
  const Memory in = memory_of("reduce_scatter", list, Use::in);
  const Memory out = memory_of("reduce_scatter", output, Use::out);
  Operation operation;
  operation.run = [in, out = out.buffer, op = reduce_op_of("reduce_scatter", options.reduceOp, output)](
                      maniple_group* group, const maniple_call* how, maniple_work** work) {
    return maniple_reduce_scatter(group, &in.buffer, &out, op, in.counts_if_unequal(), how, work);
  };
  if (!out.own) operation.finish = [out] { out.copy_back(); };
  operation.tensors = {in.flat, out.flat};
  operation.outputs = outputs;
  return call(OpType::REDUCE_SCATTER, "maniple:reduce_scatter", bytes_of(in), options.timeout, std::move(operation));
}

WorkPointer Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPointer Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  if (outputs.size() != inputs.size() || inputs.empty())
    refuse("reduce_scatter_tensor: " + std::to_string(outputs.size()) + " outputs for " +
           std::to_string(inputs.size()) + " inputs");
  struct Pair {
    Memory in, out;
    maniple_reduce_op op;
  };
  std::vector<Pair> pairs;
  Operation operation;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    require_dtype("reduce_scatter_tensor", inputs[i], outputs[i]);
    pairs.push_back({memory_of("reduce_scatter_tensor", inputs[i], Use::in),
                     memory_of("reduce_scatter_tensor", outputs[i], Use::out),
                     reduce_op_of("reduce_scatter_tensor", options.reduceOp, inputs[i])});
    operation.tensors.push_back(pairs.back().in.flat);
    operation.tensors.push_back(pairs.back().out.flat);
    bytes += bytes_of(pairs.back().in);
  }
  operation.run = [pairs](maniple_group* group, const maniple_call* how, maniple_work** work) {
    return run_all(pairs.size(), work, [&](std::size_t i, maniple_work** each) {
      return maniple_reduce_scatter(group, &pairs[i].in.buffer, &pairs[i].out.buffer, pairs[i].op, nullptr, how, each);
    });
  };
  if (std::any_of(pairs.begin(), pairs.end(), [](const Pair& pair) { return !pair.out.own; }))
    operation.finish = [pairs] {
      for (const Pair& pair : pairs) pair.out.copy_back();
    };
  operation.outputs = outputs;
  return call(OpType::_REDUCE_SCATTER_BASE, "maniple:reduce_scatter", bytes, options.timeout, std::move(operation));
}

WorkPointer Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                   std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  require_dtype("all_to_all_single", input, output);
  Memory in = memory_of("all_to_all_single", input, Use::in);
  const Memory out = memory_of("all_to_all_single", output, Use::out);
  if (in.buffer.data == out.buffer.data && in.buffer.count != 0) {
    in.flat = in.flat.detach().clone();
    in.buffer.data = in.flat.data_ptr();
  }
  Operation operation;
  operation.run = [in = in.buffer, out = out.buffer,
                   in_counts = counts_of_splits("all_to_all_single", "input", input, input_splits, in, size_),
                   out_counts = counts_of_splits("all_to_all_single", "output", output, output_splits, out, size_)](
                      maniple_group* group, const maniple_call* how, maniple_work** work) {
    return maniple_all_to_all(group, &in, &out, in_counts.data(), out_counts.data(), how, work);
  };
  if (!out.own) operation.finish = [out] { out.copy_back(); };
  operation.tensors = {in.flat, out.flat};
  operation.outputs = {output};
  return call(OpType::ALLTOALL_BASE, "maniple:all_to_all", bytes_of(in), options.timeout, std::move(operation));
}

WorkPointer Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  require_ranks("all_to_all", outputs.size());
  require_ranks("all_to_all", inputs.size());
  require_dtype("all_to_all", inputs.front(), outputs.front());
  const Memory in = memory_of("all_to_all", inputs, Use::in);
  const Memory out = memory_of("all_to_all", outputs, Use::out);
  Operation operation;
  operation.run = [in, out](maniple_group* group, const maniple_call* how, maniple_work** work) {
    return maniple_all_to_all(group, &in.buffer, &out.buffer, in.counts.data(), out.counts.data(), how, work);
  };
  if (!out.own) operation.finish = [out] { out.copy_back(); };
  operation.tensors = {in.flat, out.flat};
  operation.outputs = outputs;
  return call(OpType::ALLTOALL, "maniple:all_to_all", bytes_of(in), options.timeout, std::move(operation));
}

WorkPointer Backend::barrier(const c10d::BarrierOptions& options) {
  // The barrier runs on the host, but must also come after the work that the rank has enqueued on its GPU.
  if (const int gpu = engine_->gpu.load(); gpu >= 0) drain_current_stream(gpu);
  Operation operation;
  operation.run = [](maniple_group* group, const maniple_call* how, maniple_work** work) {
    return maniple_barrier(group, how, work);
  };
  return call(OpType::BARRIER, "maniple:barrier", 0, options.timeout, std::move(operation));
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  flush(*engine_);
  constexpr double kDefault = 30 * 60;
  const double timeout = limit(options.timeout);
  bool interrupted = false;
  const maniple_call call{0, interrupted_by_signal, &interrupted, nullptr};
  const auto error = exception_of(maniple_monitored_barrier(engine_->group, timeout > 0 ? timeout : kDefault, &call));
  if (interrupted) throw_python_error();
  if (error) std::rethrow_exception(error);
}

WorkPointer Backend::message(OpType type, const char* title, const Memory& memory, int peer, int tag) {
  const bool sends = type == OpType::SEND;
  Operation operation;
  operation.timeout_s = limit(c10d::kUnsetTimeout);
  operation.run = [buffer = memory.buffer, sends, peer, tag](maniple_group* group, const maniple_call* how,
                                                             maniple_work** work) {
    return sends ? maniple_isend(group, &buffer, peer, tag, how, work)
                 : maniple_irecv(group, &buffer, peer, tag, how, work);
  };
  if (!sends && !memory.own) operation.finish = [memory] { memory.copy_back(); };
  operation.tensors = {memory.flat};
  if (!sends) operation.outputs = {memory.own ? memory.flat : memory.tensors.front()};
  if (!memory.flat.is_cpu())
    return note(run_on_gpu(engine_, rank_, type, title, memory.flat.device(), std::move(operation)));
  auto work = c10::make_intrusive<OperationWork>(engine_, rank_, type, title, std::move(operation));
  work->start_locked();
  return note(std::move(work));
}

WorkPointer Backend::send(Tensors& tensors, int peer, int tag) {
  return message(OpType::SEND, "maniple:send", memory_of("send", only("send", tensors), Use::in), peer, tag);
}

WorkPointer Backend::recv(Tensors& tensors, int peer, int tag) {
  if (peer < 0) refuse("recv: rank " + std::to_string(peer) + " is not one of the group");
  return message(OpType::RECV, "maniple:recv", memory_of("recv", only("recv", tensors), Use::out), peer, tag);
}

WorkPointer Backend::recvAnysource(Tensors& tensors, int tag) {
  return message(OpType::RECVANYSOURCE, "maniple:recv", memory_of("recv", only("recv", tensors), Use::out), -1, tag);
}

void Backend::startCoalescing() {
  coalescing_ = true;
  coalesced_.clear();
}

#if TORCH_VERSION_MAJOR >= 2
WorkPointer Backend::endCoalescing() {
  coalescing_ = false;
  flush(*engine_);
  return combine(rank_, std::move(coalesced_));
}
#else
void Backend::endCoalescing(std::vector<WorkPointer>& works) {
  coalescing_ = false;
  flush(*engine_);
  for (WorkPointer& work : coalesced_) works.push_back(std::move(work));
  coalesced_.clear();
}
#endif

void Backend::abort() { maniple_group_abort(engine_->group, "aborted by the program (ProcessGroup.abort)"); }

void Backend::shutdown() { flush(*engine_); }

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  if (size < 0) refuse("allocateTensor: a size is negative");
  flush(*engine_);
  const auto type = c10::typeMetaToScalarType(options.dtype());
  maniple_memory* memory = nullptr;
  const maniple_call call{limit(c10d::kUnsetTimeout), nullptr, nullptr, nullptr};
  const int gpu = require_served("allocate", options.device());
  check(maniple_allocate(engine_->group, static_cast<std::size_t>(size) * c10::elementSize(type),
                         gpu < 0 ? MANIPLE_CPU : MANIPLE_CUDA, std::max(gpu, 0), &call, &memory));
  // The group frees GPU memory when the GPU is idle, and never in a thread that the GPU may be waiting for.
  const auto release = [memory](void*) { maniple_memory_free(memory); };
  return at::from_blob(maniple_memory_data(memory), {size}, release, options);
}

bool Backend::move_to_registered(const at::Tensor& tensor) {
  const at::Tensor registered = allocateTensor(tensor.numel(), tensor.options());
  const bool is_whole = tensor.is_cpu() && tensor.is_contiguous() && tensor.storage_offset() == 0 &&
                        tensor.storage().nbytes() == tensor.nbytes() && tensor.numel() > 0;
  if (!is_whole) return false;
  std::memcpy(registered.data_ptr(), tensor.data_ptr(), tensor.nbytes());
  tensor.storage().set_data_ptr(registered.storage().set_data_ptr(at::DataPtr()));
  return true;
}

void Backend::average_here(const at::Tensor& tensor) {
  const Memory memory = memory_of("all_reduce", tensor, Use::in_out);
  Operation operation;
  operation.run = [buffer = memory.buffer](maniple_group* group, const maniple_call* how, maniple_work** work) {
    return maniple_all_reduce(group, &buffer, &buffer, {MANIPLE_AVG, 1}, how, work);
  };
  if (!memory.own) operation.finish = [memory] { memory.copy_back(); };
  operation.tensors = {tensor, memory.flat};
  operation.outputs = {tensor};
  // Passes 0 bytes, so that the operation is deferred and wait() runs it.
  call(OpType::ALLREDUCE, "maniple:all_reduce", 0, c10d::kUnsetTimeout, std::move(operation))->wait();
}

}  // namespace maniple_torch
