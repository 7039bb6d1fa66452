// Gloo as a plugin backend: a context for each group, connected over the job's own store, and Gloo's collectives.
//
// Movement is done in bytes; reductions with the kernels of the native backend, two operands at a time. That gives the right result
// wherever partial results are exact in the element's type or rounded as its own sums are: not for sums and products of 16-bit
// floats, which are rounded once, after the last operand. Those, and what Gloo lacks, are supplied by Maniple.
#include <gloo/allgather.h>
#include <gloo/allgatherv.h>
#include <gloo/allreduce.h>
#include <gloo/alltoall.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/common/error.h>
#include <gloo/gather.h>
#include <gloo/reduce.h>
#include <gloo/scatter.h>

#include <cstring>

#include "backend/plugin/gloo/gloo_context.h"

namespace maniple::gloo_plugin {
namespace {

using ContextPointer = std::shared_ptr<gloo::Context>;

bool can_reduce(const Operation& op) noexcept {
  switch (op.reduce.kind()) {
    case ReduceOp::sum:
    case ReduceOp::product: return op.dtype != DType::float16 && op.dtype != DType::bfloat16;
    case ReduceOp::avg:
    case ReduceOp::premul_sum: return false;
    default: return true;
  }
}

std::uint8_t* bytes(const std::byte* data) { return reinterpret_cast<std::uint8_t*>(const_cast<std::byte*>(data)); }

/// Calls `body` with a null pointer of a type of the element's size.
template <class Body>
void with_element(std::size_t size, Body body) {
  switch (size) {
    case 1: return body(static_cast<std::uint8_t*>(nullptr));
    case 2: return body(static_cast<std::uint16_t*>(nullptr));
    case 4: return body(static_cast<std::uint32_t*>(nullptr));
    default: return body(static_cast<std::uint64_t*>(nullptr));
  }
}

void run_all_reduce(const ContextPointer& context, const Operation& op, PairReduce reduce, std::uint32_t tag) {
  gloo::AllreduceOptions options(context);
  with_element(op.element(), [&]<class T>(T*) {
    if (op.in != op.out) options.setInput(reinterpret_cast<T*>(bytes(op.in)), op.count);
    options.setOutput(reinterpret_cast<T*>(op.out), op.count);
  });
  options.setReduceFunction([&op, reduce](void* into, const void* a, const void* b, std::size_t count) {
    reduce(op.dtype, op.reduce, into, a, b, count);
  });
  options.setTag(tag);
  gloo::allreduce(options);
}

void run_reduce(const ContextPointer& context, const Operation& op, PairReduce reduce, std::uint32_t tag) {
  // Gloo leaves partial results in every rank's output; only the root has one to give.
  const bool is_root = context->rank == op.root;
  std::unique_ptr<std::byte[]> own;
  if (!is_root) own = std::make_unique_for_overwrite<std::byte[]>(op.bytes());
  std::byte* const out = is_root ? op.out : own.get();
  if (out != op.in) std::memcpy(out, op.in, op.bytes());
  gloo::ReduceOptions options(context);
  with_element(op.element(), [&]<class T>(T*) { options.setOutput(reinterpret_cast<T*>(out), op.count); });
  options.setRoot(op.root);
  options.setReduceFunction([&op, reduce](void* into, const void* a, const void* b, std::size_t count) {
    reduce(op.dtype, op.reduce, into, a, b, count);
  });
  options.setTag(tag);
  gloo::reduce(options);
}

void run_broadcast(const ContextPointer& context, const Operation& op, std::uint32_t tag) {
  gloo::BroadcastOptions options(context);
  options.setOutput(bytes(op.out), op.bytes());
  options.setRoot(op.root);
  options.setTag(tag);
  gloo::broadcast(options);
}

void run_gather(const ContextPointer& context, const Operation& op, std::uint32_t tag) {
  gloo::GatherOptions options(context);
  options.setInput(bytes(op.in), op.bytes());
  if (context->rank == op.root) options.setOutput(bytes(op.out), op.bytes() * context->size);
  options.setRoot(op.root);
  options.setTag(tag);
  gloo::gather(options);
}

void run_all_gather(const ContextPointer& context, const Operation& op, std::uint32_t tag) {
  const std::size_t element = op.element();
  std::byte* const own = op.out + op.parts.offset(context->rank) * element;
  const bool in_place = own == op.in;
  if (op.parts.equal()) {
    gloo::AllgatherOptions options(context);
    if (!in_place) options.setInput(bytes(op.in), op.bytes());
    options.setOutput(bytes(op.out), op.bytes() * context->size);
    options.setTag(tag);
    return gloo::allgather(options);
  }
  std::vector<std::size_t> counts;
  for (int rank = 0; rank < context->size; ++rank) counts.push_back(op.parts.count(rank) * element);
  gloo::AllgathervOptions options(context);
  if (!in_place && counts[context->rank] > 0) std::memcpy(own, op.in, counts[context->rank]);
  options.setOutput(bytes(op.out), counts);
  options.setTag(tag);
  gloo::allgatherv(options);
}

void run_scatter(const ContextPointer& context, const Operation& op, std::uint32_t tag) {
  gloo::ScatterOptions options(context);
  if (context->rank == op.root) {
    std::vector<std::uint8_t*> inputs;
    for (int rank = 0; rank < context->size; ++rank)
      inputs.push_back(bytes(op.in + op.parts.offset(rank) * op.element()));
    options.setInputs(inputs, op.bytes());
  }
  options.setOutput(bytes(op.out), op.bytes());
  options.setRoot(op.root);
  options.setTag(tag);
  gloo::scatter(options);
}

void run_all_to_all(const ContextPointer& context, const Operation& op, std::uint32_t tag) {
  const std::size_t all = op.in_parts.total() * op.element();
  gloo::AlltoallOptions options(context);
  options.setInput(bytes(op.in), all);
  options.setOutput(bytes(op.out), all);
  options.setTag(tag);
  gloo::alltoall(options);
}

bool has_collective(const Operation& op) noexcept {
  switch (op.op) {
    case Op::broadcast:
    case Op::barrier: return true;
    case Op::reduce:
    case Op::all_reduce: return can_reduce(op);
    case Op::all_gather: return true;
    case Op::gather:
    case Op::scatter: return op.parts.equal();
    case Op::all_to_all: return op.in_parts.equal() && op.out_parts.equal() && op.in_parts.total() > 0;
    default: return false;  // reduce_scatter: Gloo's own needs memory for the whole and is no faster
  }
}

/// `tag` differs from call to call. Throws GivenUp and what Gloo throws.
void run_collective(const std::shared_ptr<LimitedContext>& context, const Operation& op, PairReduce reduce,
                    std::uint32_t tag) {
  switch (op.op) {
    case Op::broadcast: return run_broadcast(context, op, tag);
    case Op::reduce: return run_reduce(context, op, reduce, tag);
    case Op::all_reduce: return run_all_reduce(context, op, reduce, tag);
    case Op::gather: return run_gather(context, op, tag);
    case Op::all_gather: return run_all_gather(context, op, tag);
    case Op::scatter: return run_scatter(context, op, tag);
    case Op::all_to_all: return run_all_to_all(context, op, tag);
    default: {
      gloo::BarrierOptions options(context);
      options.setTag(tag);
      gloo::barrier(options);
    }
  }
}

class GlooPlugin final : public Plugin {
 public:
  explicit GlooPlugin(const PluginContext& context)
      : context_(context), gloo_(std::make_shared<LimitedContext>(context_)) {
    const NoBrokenPipe guard;  // Gloo's thread starts here
    gloo_->connect(context_);
  }

  std::string_view name() const noexcept override { return "gloo/tcp"; }
  bool can(const Operation& operation) const noexcept override { return has_collective(operation); }

  bool run(const Operation& operation, Deadline deadline) override {
    const NoBrokenPipe guard;
    gloo_->set_deadline(deadline);
    try {
      run_collective(gloo_, operation, context_.pair_reduce, ++tag_);
      return true;
    } catch (const GivenUp&) {
      return false;
    } catch (const gloo::IoException& error) {
      throw PeerLost(std::string("a rank is lost: gloo says ") + error.what(), -1);
    }
  }

  void interrupt() noexcept override { gloo_->interrupt(); }

  // Gloo's receives block, which channels must not; and its one transport is TCP. So is ours.
  std::unique_ptr<ByteSink> sink(int, Traffic) override { return nullptr; }
  std::unique_ptr<ByteSource> source(int, Traffic) override { return nullptr; }

 private:
  PluginContext context_;
  std::shared_ptr<LimitedContext> gloo_;
  std::uint32_t tag_ = 0;
};

std::unique_ptr<Plugin> make(const PluginContext& context) { return std::make_unique<GlooPlugin>(context); }

constexpr PluginEntry kPlugin = {kPluginAbi, sizeof(Operation), "Gloo, over TCP", make};

}  // namespace
}  // namespace maniple::gloo_plugin

extern "C" const maniple::PluginEntry* maniple_plugin_entry() { return &maniple::gloo_plugin::kPlugin; }
