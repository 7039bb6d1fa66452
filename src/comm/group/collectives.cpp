// ProcessGroup's collectives: each checks its arguments, makes an Operation, and runs or starts it. Outside the group
// they do nothing.
#include <cstring>
#include <vector>

#include "comm/base/check.h"
#include "comm/group/group_impl.h"
#include "comm/group/validate.h"

namespace maniple {
namespace {

using Counts = std::span<const std::size_t>;

GroupShape shape(const ProcessGroup& group) { return {group.rank(), group.size()}; }

}  // namespace

Work ProcessGroup::broadcast(Buffer buffer, int root, const CallOptions& options, const SourceLocation& where) {
  if (!impl_->takes_part("broadcast")) return done_work();
  return impl_->run(broadcast_operation(shape(*this), buffer, root, options), options, where);
}

Work ProcessGroup::reduce(ConstBuffer input, Buffer output, int root, ReduceOp op, const CallOptions& options,
                          const SourceLocation& where) {
  if (!impl_->takes_part("reduce")) return done_work();
  return impl_->run(reduce_operation(shape(*this), input, output, root, op, options), options, where);
}

Work ProcessGroup::all_reduce(Buffer buffer, ReduceOp op, const CallOptions& options, const SourceLocation& where) {
  if (!impl_->takes_part("all_reduce")) return done_work();
  return impl_->run(all_reduce_operation(shape(*this), buffer, buffer, op, options), options, where);
}

Work ProcessGroup::all_reduce(ConstBuffer input, Buffer output, ReduceOp op, const CallOptions& options,
                              const SourceLocation& where) {
  if (!impl_->takes_part("all_reduce")) return done_work();
  return impl_->run(all_reduce_operation(shape(*this), input, output, op, options), options, where);
}

Work ProcessGroup::gather(ConstBuffer input, Buffer output, int root, Counts counts, const CallOptions& options,
                          const SourceLocation& where) {
  if (!impl_->takes_part("gather")) return done_work();
  return impl_->run(gather_operation(shape(*this), input, output, root, counts, options), options, where);
}

Work ProcessGroup::all_gather(ConstBuffer input, Buffer output, Counts counts, const CallOptions& options,
                              const SourceLocation& where) {
  if (!impl_->takes_part("all_gather")) return done_work();
  return impl_->run(all_gather_operation(shape(*this), input, output, counts, options), options, where);
}

Work ProcessGroup::scatter(ConstBuffer input, Buffer output, int root, Counts counts, const CallOptions& options,
                           const SourceLocation& where) {
  if (!impl_->takes_part("scatter")) return done_work();
  return impl_->run(scatter_operation(shape(*this), input, output, root, counts, options), options, where);
}

Work ProcessGroup::reduce_scatter(ConstBuffer input, Buffer output, ReduceOp op, Counts counts,
                                  const CallOptions& options, const SourceLocation& where) {
  if (!impl_->takes_part("reduce_scatter")) return done_work();
  return impl_->run(reduce_scatter_operation(shape(*this), input, output, op, counts, options), options, where);
}

Work ProcessGroup::all_to_all(ConstBuffer input, Buffer output, Counts input_counts, Counts output_counts,
                              const CallOptions& options, const SourceLocation& where) {
  if (!impl_->takes_part("all_to_all")) return done_work();
  return impl_->run(all_to_all_operation(shape(*this), input, output, input_counts, output_counts, options), options,
                    where);
}

Work ProcessGroup::barrier(const CallOptions& options, const SourceLocation& where) {
  if (!impl_->takes_part("barrier")) return done_work();
  return impl_->run(barrier_operation(options), options, where);
}

// all_reduce of many buffers in one operation.
//
// Small buffers of one dtype are packed into one piece of memory, reduced together and unpacked; large buffers are
// reduced in place. The order is the list's, dtype by dtype, so it is the same on all ranks. Ranks compare the list of
// counts like any other argument.

namespace {

constexpr std::size_t kSmall = 64 * 1024;            // maximum bytes of a buffer to be packed
constexpr std::size_t kPack = std::size_t{1} << 20;  // maximum bytes of a pack

struct Coalesced {
  detail::GroupImpl& group;
  std::vector<Buffer> buffers;
  ReduceOp op;
  CallOptions call;
  std::vector<std::byte> pack{};

  void run(OperationContext& context) {
    for (int d = 0; d < kDTypeCount; ++d) {
      std::vector<Buffer> small;
      std::size_t packed = 0;
      for (const Buffer& buffer : buffers) {
        if (buffer.dtype != static_cast<DType>(d)) continue;
        if (buffer.bytes() > kSmall) {
          reduce(buffer, {}, context);
          continue;
        }
        if (packed + buffer.bytes() > kPack) {
          reduce_packed(small, context);
          packed = 0;
        }
        small.push_back(buffer);
        packed += buffer.bytes();
      }
      reduce_packed(small, context);
    }
  }

  void reduce(Buffer buffer, Parts counts, OperationContext& context) {
    Operation operation = all_reduce_operation({group.rank(), group.size()}, buffer, buffer, op, call);
    operation.parts = std::move(counts);
    group.execute(operation, context);
  }

  void reduce_packed(std::vector<Buffer>& small, OperationContext& context) {
    if (small.empty()) return;
    std::vector<std::size_t> counts;
    std::size_t bytes = 0;
    for (const Buffer& buffer : small) {
      counts.push_back(buffer.count);
      bytes += buffer.bytes();
    }
    if (pack.size() < bytes) pack.resize(bytes);
    copy(small, [](std::byte* packed, std::byte* own, std::size_t n) { std::memcpy(packed, own, n); });
    const DType dtype = small.front().dtype;
    reduce({pack.data(), bytes / size_of(dtype), dtype}, Parts(counts), context);
    copy(small, [](std::byte* packed, std::byte* own, std::size_t n) { std::memcpy(own, packed, n); });
    small.clear();
  }

  template <class Copy>
  void copy(const std::vector<Buffer>& small, Copy&& one) {
    std::size_t at = 0;
    for (const Buffer& buffer : small) {
      if (buffer.count != 0) one(pack.data() + at, static_cast<std::byte*>(buffer.data), buffer.bytes());
      at += buffer.bytes();
    }
  }
};

Coalesced checked(detail::GroupImpl& group, std::span<const Buffer> buffers, ReduceOp op, const CallOptions& call) {
  for (const Buffer& buffer : buffers) {
    all_reduce_operation({group.rank(), group.size()}, buffer, buffer, op, call);
    MANIPLE_REQUIRE(buffer.device == buffers.front().device,
                    "all_reduce_coalesced: buffers are on {} and on {}; all must be on one device",
                    to_string(buffers.front().device), to_string(buffer.device));
  }
  std::vector<UsedMemory> extents;
  for (const Buffer& buffer : buffers) extents.push_back({buffer.data, buffer.bytes(), true});
  require_apart("all_reduce_coalesced", std::move(extents));
  return {group, {buffers.begin(), buffers.end()}, op, call};
}

}  // namespace

Work ProcessGroup::all_reduce_coalesced(std::span<const Buffer> buffers, ReduceOp op, const CallOptions& options,
                                        const SourceLocation& where) {
  const CallOptions call = called_at(options, where);
  if (!impl_->takes_part("all_reduce_coalesced")) return done_work();
  Coalesced task = checked(*impl_, buffers, op, call);
  if (!buffers.empty() && !buffers.front().device.is_cpu()) {
    std::vector<Operation> operations;
    for (const Buffer& buffer : buffers)
      operations.push_back(all_reduce_operation({rank(), size()}, buffer, buffer, op, call));
    return impl_->enqueue(operations, call);
  }
  if (call.async_op) {
    return impl_->start_tasks(Op::all_reduce, call,
                              [task = std::move(task)](OperationContext& context) mutable { task.run(context); });
  }
  impl_->run_tasks(Op::all_reduce, call, [&task](OperationContext& context) { task.run(context); });
  return done_work();
}

}  // namespace maniple
