#include "backend.h"

#include <algorithm>

#include <torch/csrc/utils/pybind.h>

#include "calls.h"
#include "device.h"
#include "errors.h"

namespace maniple_torch {

using c10d::OpType;
Backend::Backend(maniple_group* group, int rank, int size, double timeout_s)
    : Base(rank, size),
      engine_(std::make_shared<Engine>()),
      options_(c10::make_intrusive<BackendOptions>(
          std::chrono::duration_cast<Milliseconds>(std::chrono::duration<double>(timeout_s)))),
      split_backend_(BasePointer()) {
  engine_->group = group;
  watch(engine_);
#if TORCH_VERSION_MAJOR < 2
  init();
#endif
}

Backend::~Backend() {
  // Release the GIL: the group's thread may need the interpreter to free tensors.
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    const py::gil_scoped_release release;
    leave(*engine_);
  } else {
    leave(*engine_);
  }
}

double Backend::limit(Milliseconds timeout) const {
  return static_cast<double>(timeout.count() > 0 ? timeout.count() : options_->timeout.count()) / 1000;
}

void Backend::require_ranks(const char* op, std::size_t count) const {
  if (count != static_cast<std::size_t>(size_))
    refuse(std::string(op) + ": a list of " + std::to_string(count) + " tensors for " + std::to_string(size_) +
           " ranks; expected one for each");
}

int Backend::require_root(const char* op, int64_t root) const {
  if (root < 0 || root >= size_)
    refuse(std::string(op) + ": invalid root rank " + std::to_string(root) + "; the group has ranks 0 to " +
           std::to_string(size_ - 1));
  return static_cast<int>(root);
}

WorkPointer Backend::note(WorkPointer work) {
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

WorkPointer Backend::call(OpType type, const char* title, std::size_t bytes, Milliseconds timeout,
                          Operation operation) {
  ++sequence_;
  operation.timeout_s = limit(timeout);
  auto run = std::move(operation.run);
  operation.run = [run = std::move(run)](maniple_group* group, const maniple_call* how, maniple_work** work) {
    return group == nullptr ? is_gone() : run(group, how, work);
  };
  const at::Device device = device_of(title, operation);
  if (!device.is_cpu()) return note(run_on_gpu(engine_, rank_, type, title, device, std::move(operation)));
  auto work = c10::make_intrusive<OperationWork>(engine_, rank_, type, title, std::move(operation));
  post(engine_, work, bytes <= kDeferredBytes);
  return note(std::move(work));
}

WorkPointer Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only("broadcast", tensors);
  const int root = require_root("broadcast", options.rootRank);
  const Memory memory = memory_of("broadcast", tensor, rank_ == root ? Use::in : Use::out);
  Operation operation;
  operation.run = [buffer = memory.buffer, root](maniple_group* group, const maniple_call* how, maniple_work** work) {
    return maniple_broadcast(group, &buffer, root, how, work);
  };
  if (!memory.own && rank_ != root) operation.finish = [memory] { memory.copy_back(); };
  operation.tensors = {tensor, memory.flat};
  operation.outputs = tensors;
  return call(OpType::BROADCAST, "maniple:broadcast", bytes_of(memory), options.timeout, std::move(operation));
}

WorkPointer Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only("all_reduce", tensors);
  if (tensor.defined() && tensor.layout() == at::kSparse) return allreduce_of_sparse(tensor, options);
  const Memory memory = memory_of("all_reduce", tensor, Use::in_out);
  Operation operation;
  operation.run = [buffer = memory.buffer, op = reduce_op_of("all_reduce", options.reduceOp, tensor)](
                      maniple_group* group, const maniple_call* how, maniple_work** work) {
    return maniple_all_reduce(group, &buffer, &buffer, op, how, work);
  };
  if (!memory.own) operation.finish = [memory] { memory.copy_back(); };
  operation.tensors = {tensor, memory.flat};
  operation.outputs = tensors;
  return call(OpType::ALLREDUCE, "maniple:all_reduce", bytes_of(memory), options.timeout, std::move(operation));
}

// Every rank gathers all ranks' elements and adds them in rank order. The counts must be known before memory can be
// allocated, so the call itself waits for the other ranks to exchange counts; the returned work is then in progress.
WorkPointer Backend::allreduce_of_sparse(const at::Tensor& tensor, const c10d::AllreduceOptions& options) {
  const c10d::ReduceOp::RedOpType kind = options.reduceOp.op_;
  if (kind != c10d::ReduceOp::SUM && !(kind == c10d::ReduceOp::AVG && at::isFloatingType(tensor.scalar_type())))
    throw Failure(MANIPLE_UNSUPPORTED,
                  "all_reduce: sparse tensors can be summed (SUM), and averaged (AVG) if they are floating-point; "
                  "pass a dense one (x.to_dense())");
  if (!tensor.is_cpu())
    throw Failure(MANIPLE_UNSUPPORTED, "all_reduce: a sparse tensor is on " + tensor.device().str() +
                                           "; expected one of the CPU, or a dense one (x.to_dense())");
  const at::NoGradGuard no_grad;
  const at::Tensor own = tensor.coalesce();
  const std::int64_t places = own.sparse_dim();
  at::Tensor facts =
      at::cat({at::tensor({own._nnz(), places, own.dim()}, at::kLong), at::tensor(own.sizes(), at::kLong)});
  constexpr std::int64_t kFacts = 3 + 64;  // a fixed size, so that it is the same on all ranks
  if (facts.numel() > kFacts) refuse("all_reduce: a sparse tensor of more than 64 dimensions");
  facts = at::constant_pad_nd(facts, {0, kFacts - facts.numel()});
  at::Tensor all = at::empty({size_, kFacts}, facts.options());
  c10d::AllgatherOptions how_long;
  how_long.timeout = options.timeout;
  _allgather_base(all, facts, how_long)->wait();
  const auto shape_of = [&all](int rank) {
    std::string text = "[";
    const auto dimensions = all[rank][2].item<std::int64_t>();
    for (std::int64_t i = 0; i < dimensions; ++i)
      text += (i == 0 ? "" : ", ") + std::to_string(all[rank][3 + i].item<std::int64_t>());
    return text + "] with " + std::to_string(all[rank][1].item<std::int64_t>()) + " sparse";
  };
  for (int rank = 1; rank < size_; ++rank) {
    if (all[rank].slice(0, 1).equal(all[0].slice(0, 1))) continue;
    refuse("all_reduce: the sparse tensor of rank " + std::to_string(rank) + " has the shape " + shape_of(rank) +
           ", on rank 0 " + shape_of(0) + "; all ranks must pass the same");
  }

  struct Part {
    Memory in, out;
    std::vector<std::size_t> counts;
  };
  std::vector<Part> parts;  // the elements' indices and values
  const std::int64_t total = all.select(1, 0).sum().item<std::int64_t>();
  Operation operation;
  operation.tensors = {tensor};
  std::size_t bytes = 0;
  for (const at::Tensor& in : {own.indices().t().contiguous(), own.values().contiguous()}) {
    std::vector<std::int64_t> shape = in.sizes().vec();
    shape[0] = total;
    Part part{
        memory_of("all_reduce", in, Use::in), memory_of("all_reduce", at::empty(shape, in.options()), Use::out), {}};
    const std::size_t elements = total == 0 ? 0 : part.out.buffer.count / static_cast<std::size_t>(total);  // per entry
    for (int rank = 0; rank < size_; ++rank)
      part.counts.push_back(elements * static_cast<std::size_t>(all[rank][0].item<std::int64_t>()));
    operation.tensors.insert(operation.tensors.end(), {part.in.flat, part.out.flat});
    bytes += bytes_of(part.out);
    parts.push_back(std::move(part));
  }
  operation.run = [parts](maniple_group* group, const maniple_call* how, maniple_work** work) {
    return run_all(parts.size(), work, [&](std::size_t i, maniple_work** each) {
      const Part& part = parts[i];
      return maniple_all_gather(group, &part.in.buffer, &part.out.buffer, part.counts.data(), how, each);
    });
  };
  operation.finish = [tensor, parts, divisor = kind == c10d::ReduceOp::AVG ? size_ : 1] {
    const at::NoGradGuard no_grad_here;
    at::Tensor result =
        at::sparse_coo_tensor(parts[0].out.flat.t(), parts[1].out.flat, tensor.sizes(), tensor.options()).coalesce();
    if (divisor != 1) result.values().div_(divisor);
    at::Tensor(tensor).copy_(result);
  };
  operation.outputs = {tensor};
  return call(OpType::ALLREDUCE, "maniple:all_reduce", bytes, options.timeout, std::move(operation));
}

WorkPointer Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  if (tensors.empty()) refuse("all_reduce_coalesced: the list of tensors is empty");
  std::vector<Memory> memories;
  std::vector<maniple_buffer> buffers;
  Operation operation;
  std::size_t bytes = 0;
  maniple_reduce_op op{};
  for (const at::Tensor& tensor : tensors) {
    op = reduce_op_of("all_reduce_coalesced", options.reduceOp, tensor);
    memories.push_back(memory_of("all_reduce_coalesced", tensor, Use::in_out));
    buffers.push_back(memories.back().buffer);
    operation.tensors.push_back(memories.back().flat);
    bytes += bytes_of(memories.back());
  }
  operation.inputs = tensors.size();
  operation.run = [buffers, op](maniple_group* group, const maniple_call* how, maniple_work** work) {
    return maniple_all_reduce_coalesced(group, buffers.data(), buffers.size(), op, how, work);
  };
  if (std::any_of(memories.begin(), memories.end(), [](const Memory& memory) { return !memory.own; }))
    operation.finish = [memories] {
      for (const Memory& memory : memories) memory.copy_back();
    };
  operation.outputs = tensors;
  return call(OpType::ALLREDUCE_COALESCED, "maniple:all_reduce", bytes, options.timeout, std::move(operation));
}

WorkPointer Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only("reduce", tensors);
  const int root = require_root("reduce", options.rootRank);
  const Memory memory = memory_of("reduce", tensor, Use::in_out);
  const maniple_buffer out = rank_ == root ? memory.buffer : nothing_like(memory).buffer;
  Operation operation;
  operation.run = [in = memory.buffer, out, root, op = reduce_op_of("reduce", options.reduceOp, tensor)](
                      maniple_group* group, const maniple_call* how, maniple_work** work) {
    return maniple_reduce(group, &in, &out, root, op, how, work);
  };
  if (!memory.own && rank_ == root) operation.finish = [memory] { memory.copy_back(); };
  operation.tensors = {tensor, memory.flat};
  operation.outputs = tensors;
  return call(OpType::REDUCE, "maniple:reduce", bytes_of(memory), options.timeout, std::move(operation));
}

WorkPointer Backend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const Tensors& list = only("all_gather", outputs);
  const at::Tensor& input = only("all_gather", inputs);
  require_ranks("all_gather", list.size());
  require_dtype("all_gather", input, list.front());
  const Memory in = memory_of("all_gather", input, Use::in);
  const Memory out = memory_of("all_gather", list, Use::out);
  Operation operation;
  operation.run = [in = in.buffer, out](maniple_group* group, const maniple_call* how, maniple_work** work) {
    return maniple_all_gather(group, &in, &out.buffer, out.counts_if_unequal(), how, work);
  };
  if (!out.own) operation.finish = [out] { out.copy_back(); };
  operation.tensors = {in.flat, out.flat};
  operation.outputs = list;
  return call(OpType::ALLGATHER, "maniple:all_gather", bytes_of(out), options.timeout, std::move(operation));
}

WorkPointer Backend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkPointer Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& options) {
  if (outputs.size() != inputs.size() || inputs.empty())
    refuse("all_gather_into_tensor: " + std::to_string(outputs.size()) + " outputs for " +
           std::to_string(inputs.size()) + " inputs");
  std::vector<std::pair<Memory, Memory>> pairs;
  Operation operation;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    pairs.emplace_back(memory_of("all_gather_into_tensor", inputs[i], Use::in),
                       memory_of("all_gather_into_tensor", outputs[i], Use::out));
    operation.tensors.push_back(pairs.back().first.flat);
    bytes += bytes_of(pairs.back().second);
  }
  operation.inputs = pairs.size();
  for (const auto& pair : pairs) operation.tensors.push_back(pair.second.flat);
  operation.run = [pairs](maniple_group* group, const maniple_call* how, maniple_work** work) {
    return run_all(pairs.size(), work, [&](std::size_t i, maniple_work** each) {
      return maniple_all_gather(group, &pairs[i].first.buffer, &pairs[i].second.buffer, nullptr, how, each);
    });
  };
  if (std::any_of(pairs.begin(), pairs.end(), [](const auto& pair) { return !pair.second.own; }))
    operation.finish = [pairs] {
      for (const auto& pair : pairs) pair.second.copy_back();
    };
  operation.outputs = outputs;
  return call(OpType::_ALLGATHER_BASE, "maniple:all_gather", bytes, options.timeout, std::move(operation));
}

WorkPointer Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  require_ranks("all_gather_coalesced", outputs.size());
  std::vector<std::pair<Memory, Memory>> pairs;
  Operation operation;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors column;
    for (const Tensors& of_rank : outputs) {
      if (of_rank.size() != inputs.size())
        refuse("all_gather_coalesced: a list of outputs is not as long as the list of inputs");
      column.push_back(of_rank[i]);
      operation.outputs.push_back(of_rank[i]);
    }
    pairs.emplace_back(memory_of("all_gather_coalesced", inputs[i], Use::in),
                       memory_of("all_gather_coalesced", column, Use::out));
    operation.tensors.push_back(pairs.back().first.flat);
    bytes += bytes_of(pairs.back().second);
  }
  if (pairs.empty()) refuse("all_gather_coalesced: the list of tensors is empty");
  operation.inputs = pairs.size();
  for (const auto& pair : pairs) operation.tensors.push_back(pair.second.flat);
  operation.run = [pairs](maniple_group* group, const maniple_call* how, maniple_work** work) {
    return run_all(pairs.size(), work, [&](std::size_t i, maniple_work** each) {
      const Memory& out = pairs[i].second;
      return maniple_all_gather(group, &pairs[i].first.buffer, &out.buffer, out.counts_if_unequal(), how, each);
    });
  };
  if (std::any_of(pairs.begin(), pairs.end(), [](const auto& pair) { return !pair.second.own; }))
    operation.finish = [pairs] {
      for (const auto& pair : pairs) pair.second.copy_back();
    };
  return call(OpType::ALLGATHER_COALESCED, "maniple:all_gather", bytes, options.timeout, std::move(operation));
}

}  // namespace maniple_torch
