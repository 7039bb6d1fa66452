// Communication hooks of DistributedDataParallel: they replace the plain average of gradients, for example to compress
// them.
//
//   ddp.register_comm_hook(maniple::fp16_compress_hook());              // a predefined hook
//   ddp.register_comm_hook(maniple::comm_hook_named("bf16"));           // by its name in comm_hooks()
//   ddp.register_comm_hook([](GradBucket& bucket, CommContext& comm) {  // a hook of your own
//     bucket.buffer().clamp_(-1, 1);
//     return comm.all_reduce(bucket.buffer(), ReduceOp::avg);
//   });
//
// A hook is called once per bucket of a synchronised backward, in the thread that runs backward, and in the same order
// on every rank. When the Work that it returns is done, the bucket's buffer must hold the gradient for the optimizer,
// the same on all ranks: normally the average over ranks. (With weighted ranks the buffer is multiplied before the hook
// runs, so that the plain average becomes the weighted one.)
//
// A hook calls the same collectives on all ranks. Exceptions from a hook are thrown by backward().
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <torch/types.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// A bucket whose gradients are complete on this rank.
class GradBucket {
 public:
  /// All gradients, one after the other: one-dimensional and contiguous, with up to 63 bytes of zeros between two
  /// parameters. The optimizer sees in-place changes of the buffer.
  const torch::Tensor& buffer() const noexcept { return buffer_; }
  /// Buckets are numbered in the order in which their gradients become ready in backward, from 0.
  int index() const noexcept { return index_; }
  bool is_last() const noexcept { return is_last_; }
  /// The parameters in buffer order; gradients() are views of the buffer in their shapes.
  const std::vector<torch::Tensor>& parameters() const noexcept { return parameters_; }
  const std::vector<torch::Tensor>& gradients() const noexcept { return gradients_; }
  /// Names of the parameters in the module ("fc1.weight"). Use them as keys for state kept across steps.
  const std::vector<std::string>& names() const noexcept { return names_; }

  // internal
  GradBucket(torch::Tensor buffer, int index, bool is_last, std::vector<torch::Tensor> parameters,
             std::vector<torch::Tensor> gradients, std::vector<std::string> names)
      : buffer_(std::move(buffer)),
        index_(index),
        is_last_(is_last),
        parameters_(std::move(parameters)),
        gradients_(std::move(gradients)),
        names_(std::move(names)) {}

 private:
  torch::Tensor buffer_;
  int index_;
  bool is_last_;
  std::vector<torch::Tensor> parameters_;
  std::vector<torch::Tensor> gradients_;
  std::vector<std::string> names_;
};

/// Communication for a hook: the group, and operations that run at once or in the group's thread, according to the
/// option `overlap`. An invalid Work returned by them counts as done.
class CommContext {
 public:
  CommContext(std::shared_ptr<ProcessGroup> group, bool async) : group_(std::move(group)), async_(async) {}
  const std::shared_ptr<ProcessGroup>& group() const noexcept { return group_; }
  bool async() const noexcept { return async_; }  ///< whether the hook should return before communication has finished

  /// In place; keeps the tensor alive until the operation is done.
  Work all_reduce(const torch::Tensor& tensor, ReduceOp op = ReduceOp::avg) const;

  /// Runs `next` when `work` is done: immediately if it is done already, otherwise in the group's thread.
  Work then(const Work& work, std::function<void()> next) const;

 private:
  std::shared_ptr<ProcessGroup> group_;
  bool async_;
};

using CommHook = std::function<Work(GradBucket& bucket, CommContext& comm)>;

/// The plain average, as without a hook.
CommHook allreduce_hook();

/// Sends float32 and float64 gradients as float16 (range 6e-8 .. 65504: large gradients overflow to infinity) or as
/// bfloat16 (range of float32, 8 bits of precision). Half the bytes or less. Each rank's gradient is rounded once
/// before averaging; the average is taken in float32 and rounded once. Useful between hosts; in shared memory the
/// conversion costs more than it saves.
CommHook fp16_compress_hook();
CommHook bf16_compress_hook();

/// The named hooks: "all_reduce", "fp16", "bf16", "int8", "powerSGD". int8 and powerSGD use their default options; see
/// int8_hook.h and power_sgd.h.
struct NamedCommHook {
  const char* name;
  const char* summary;
  CommHook (*make)();
};
std::span<const NamedCommHook> comm_hooks() noexcept;
CommHook comm_hook_named(std::string_view name);  ///< throws InvalidArgument, which lists the names

/// Bytes that this rank has sent through a hook, compared with a plain average of the same gradients. An all_reduce of
/// B bytes over n ranks costs each rank 2 (n-1)/n B. (Ranks of one host exchange the same number of bytes in shared
/// memory.)
struct HookTraffic {
  std::uint64_t sent_bytes = 0;
  std::uint64_t plain_bytes = 0;

  /// 4 means a quarter of the bytes; 1 if nothing was sent.
  double compression_rate() const noexcept {
    return sent_bytes == 0 ? 1 : static_cast<double>(plain_bytes) / static_cast<double>(sent_bytes);
  }
};

}  // namespace maniple
