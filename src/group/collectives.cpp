// The collectives of ProcessGroup: each is checked, made into an Operation, and run or started. Outside the group they do nothing.

#include "group/group_impl.h"
#include "group/validate.h"

namespace maniple {
namespace {

using Counts = std::span<const std::size_t>;

GroupShape shape(const ProcessGroup& group) { return {group.rank(), group.size()}; }

}  // namespace

Work ProcessGroup::broadcast(Buffer buffer, int root, const CallOptions& options) {
  if (!impl_->takes_part("broadcast")) return done_work();
  return impl_->run(broadcast_operation(shape(*this), buffer, root, options), options);
}

Work ProcessGroup::reduce(ConstBuffer input, Buffer output, int root, ReduceOp op, const CallOptions& options) {
  if (!impl_->takes_part("reduce")) return done_work();
  return impl_->run(reduce_operation(shape(*this), input, output, root, op, options), options);
}

Work ProcessGroup::all_reduce(Buffer buffer, ReduceOp op, const CallOptions& options) {
  if (!impl_->takes_part("all_reduce")) return done_work();
  return impl_->run(all_reduce_operation(shape(*this), buffer, buffer, op, options), options);
}

Work ProcessGroup::all_reduce(ConstBuffer input, Buffer output, ReduceOp op, const CallOptions& options) {
  if (!impl_->takes_part("all_reduce")) return done_work();
  return impl_->run(all_reduce_operation(shape(*this), input, output, op, options), options);
}

Work ProcessGroup::gather(ConstBuffer input, Buffer output, int root, Counts counts, const CallOptions& options) {
  if (!impl_->takes_part("gather")) return done_work();
  return impl_->run(gather_operation(shape(*this), input, output, root, counts, options), options);
}

Work ProcessGroup::all_gather(ConstBuffer input, Buffer output, Counts counts, const CallOptions& options) {
  if (!impl_->takes_part("all_gather")) return done_work();
  return impl_->run(all_gather_operation(shape(*this), input, output, counts, options), options);
}

Work ProcessGroup::scatter(ConstBuffer input, Buffer output, int root, Counts counts, const CallOptions& options) {
  if (!impl_->takes_part("scatter")) return done_work();
  return impl_->run(scatter_operation(shape(*this), input, output, root, counts, options), options);
}

Work ProcessGroup::reduce_scatter(ConstBuffer input, Buffer output, ReduceOp op, Counts counts,
                                  const CallOptions& options) {
  if (!impl_->takes_part("reduce_scatter")) return done_work();
  return impl_->run(reduce_scatter_operation(shape(*this), input, output, op, counts, options), options);
}

Work ProcessGroup::all_to_all(ConstBuffer input, Buffer output, Counts input_counts, Counts output_counts,
                              const CallOptions& options) {
  if (!impl_->takes_part("all_to_all")) return done_work();
  return impl_->run(all_to_all_operation(shape(*this), input, output, input_counts, output_counts, options), options);
}

Work ProcessGroup::barrier(const CallOptions& options) {
  if (!impl_->takes_part("barrier")) return done_work();
  return impl_->run(barrier_operation(options), options);
}

}  // namespace maniple
