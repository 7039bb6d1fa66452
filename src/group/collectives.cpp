// The collectives of ProcessGroup: each is checked, made into an Operation, and run or started. Outside the group they do nothing.

#include "group/group_impl.h"
#include "group/validate.h"

namespace maniple {
namespace {

GroupShape shape(const ProcessGroup& group) { return {group.rank(), group.size()}; }

}  // namespace

void ProcessGroup::broadcast(Buffer buffer, int root, Call call) {
  if (impl_->takes_part("broadcast")) impl_->run(broadcast_operation(shape(*this), buffer, root, call), call);
}
Work ProcessGroup::broadcast_async(Buffer buffer, int root, Call call) {
  return impl_->takes_part("broadcast") ? impl_->start(broadcast_operation(shape(*this), buffer, root, call), call) : done_work();
}

void ProcessGroup::reduce(ConstBuffer input, Buffer output, int root, ReduceOp op, Call call) {
  if (impl_->takes_part("reduce")) impl_->run(reduce_operation(shape(*this), input, output, root, op, call), call);
}
Work ProcessGroup::reduce_async(ConstBuffer input, Buffer output, int root, ReduceOp op, Call call) {
  return impl_->takes_part("reduce") ? impl_->start(reduce_operation(shape(*this), input, output, root, op, call), call) : done_work();
}

void ProcessGroup::all_reduce(Buffer buffer, ReduceOp op, Call call) {
  if (impl_->takes_part("all_reduce")) impl_->run(all_reduce_operation(shape(*this), buffer, buffer, op, call), call);
}
Work ProcessGroup::all_reduce_async(Buffer buffer, ReduceOp op, Call call) {
  return impl_->takes_part("all_reduce") ? impl_->start(all_reduce_operation(shape(*this), buffer, buffer, op, call), call) : done_work();
}
void ProcessGroup::all_reduce(ConstBuffer input, Buffer output, ReduceOp op, Call call) {
  if (impl_->takes_part("all_reduce")) impl_->run(all_reduce_operation(shape(*this), input, output, op, call), call);
}
Work ProcessGroup::all_reduce_async(ConstBuffer input, Buffer output, ReduceOp op, Call call) {
  return impl_->takes_part("all_reduce") ? impl_->start(all_reduce_operation(shape(*this), input, output, op, call), call) : done_work();
}

void ProcessGroup::gather(ConstBuffer input, Buffer output, int root, std::span<const std::size_t> counts, Call call) {
  if (impl_->takes_part("gather")) impl_->run(gather_operation(shape(*this), input, output, root, counts, call), call);
}
Work ProcessGroup::gather_async(ConstBuffer input, Buffer output, int root, std::span<const std::size_t> counts, Call call) {
  return impl_->takes_part("gather") ? impl_->start(gather_operation(shape(*this), input, output, root, counts, call), call) : done_work();
}

void ProcessGroup::all_gather(ConstBuffer input, Buffer output, std::span<const std::size_t> counts, Call call) {
  if (impl_->takes_part("all_gather")) impl_->run(all_gather_operation(shape(*this), input, output, counts, call), call);
}
Work ProcessGroup::all_gather_async(ConstBuffer input, Buffer output, std::span<const std::size_t> counts, Call call) {
  return impl_->takes_part("all_gather") ? impl_->start(all_gather_operation(shape(*this), input, output, counts, call), call) : done_work();
}

void ProcessGroup::scatter(ConstBuffer input, Buffer output, int root, std::span<const std::size_t> counts, Call call) {
  if (impl_->takes_part("scatter")) impl_->run(scatter_operation(shape(*this), input, output, root, counts, call), call);
}
Work ProcessGroup::scatter_async(ConstBuffer input, Buffer output, int root, std::span<const std::size_t> counts, Call call) {
  return impl_->takes_part("scatter") ? impl_->start(scatter_operation(shape(*this), input, output, root, counts, call), call) : done_work();
}

void ProcessGroup::reduce_scatter(ConstBuffer input, Buffer output, ReduceOp op, std::span<const std::size_t> counts, Call call) {
  if (impl_->takes_part("reduce_scatter")) impl_->run(reduce_scatter_operation(shape(*this), input, output, op, counts, call), call);
}
Work ProcessGroup::reduce_scatter_async(ConstBuffer input, Buffer output, ReduceOp op, std::span<const std::size_t> counts, Call call) {
  return impl_->takes_part("reduce_scatter") ? impl_->start(reduce_scatter_operation(shape(*this), input, output, op, counts, call), call) : done_work();
}

void ProcessGroup::all_to_all(ConstBuffer input, Buffer output, std::span<const std::size_t> input_counts,
                              std::span<const std::size_t> output_counts, Call call) {
  if (impl_->takes_part("all_to_all")) impl_->run(all_to_all_operation(shape(*this), input, output, input_counts, output_counts, call), call);
}
Work ProcessGroup::all_to_all_async(ConstBuffer input, Buffer output, std::span<const std::size_t> input_counts,
                                    std::span<const std::size_t> output_counts, Call call) {
  return impl_->takes_part("all_to_all") ? impl_->start(all_to_all_operation(shape(*this), input, output, input_counts, output_counts, call), call) : done_work();
}

void ProcessGroup::barrier(Call call) {
  if (impl_->takes_part("barrier")) impl_->run(barrier_operation(call), call);
}
Work ProcessGroup::barrier_async(Call call) {
  return impl_->takes_part("barrier") ? impl_->start(barrier_operation(call), call) : done_work();
}

}  // namespace maniple
