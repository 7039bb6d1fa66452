// What travels when gradients are averaged: the extension point of DistributedDataParallel, and the hooks that come
// with it.
//
//   ddp.register_comm_hook(maniple::fp16_compress_hook());              // one that is there
//   ddp.register_comm_hook(maniple::comm_hook_named("bf16"));           // the same by its name in comm_hooks()
//   ddp.register_comm_hook([](GradBucket& bucket, CommContext& comm) {  // one of your own
//     bucket.buffer().clamp_(-1, 1);
//     return comm.all_reduce(bucket.buffer(), ReduceOp::avg);
//   });
//
// A hook is called once for each bucket of a synchronised backward, on every rank in the same order, in the thread that
// runs backward. It has to see to it that, once the Work it returns is done, the bucket's buffer holds what the
// optimizer shall see as the gradient, the same on all ranks: normally the average over ranks. (Where ranks are
// weighted, the buffer has been multiplied before, such that the plain average is the weighted one.)
//
// A hook calls the same collectives on all ranks. What it throws, backward() throws.
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
  /// All gradients one after the other: one-dimensional, contiguous. Between two parameters there may be up to 63 bytes
  /// of zeros. In place changes are what the optimizer sees.
  const torch::Tensor& buffer() const noexcept { return buffer_; }
  /// 0 is the bucket whose gradients are ready first in backward.
  int index() const noexcept { return index_; }
  bool is_last() const noexcept { return is_last_; }
  /// The parameters in the order of the buffer, and views of the buffer in their shapes.
  const std::vector<torch::Tensor>& parameters() const noexcept { return parameters_; }
  const std::vector<torch::Tensor>& gradients() const noexcept { return gradients_; }
  /// The parameters' names in the module, "fc1.weight": by them a hook keeps what it remembers from step to step.
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

/// What a hook communicates with: the group, and operations that run now or in the group's own thread, as the option
/// `overlap` says. A Work that they return may be invalid, which means done.
class CommContext {
 public:
  CommContext(std::shared_ptr<ProcessGroup> group, bool async) : group_(std::move(group)), async_(async) {}
  const std::shared_ptr<ProcessGroup>& group() const noexcept { return group_; }
  bool async() const noexcept { return async_; }  ///< whether the hook should return before the communication is done

  /// In place; the tensor is kept alive until it is done.
  Work all_reduce(const torch::Tensor& tensor, ReduceOp op = ReduceOp::avg) const;

  /// Runs `next` once `work` is done: at once if it is, otherwise in the group's thread.
  Work then(const Work& work, std::function<void()> next) const;

 private:
  std::shared_ptr<ProcessGroup> group_;
  bool async_;
};

using CommHook = std::function<Work(GradBucket& bucket, CommContext& comm)>;

/// The average as it is: what DistributedDataParallel does without a hook.
CommHook allreduce_hook();

/// float32 and float64 gradients travel as float16 (range 6e-8 .. 65504: large gradients overflow to infinity) or as
/// bfloat16 (range of float32, 8 bits of precision). Half the bytes or less; each rank's gradient is rounded once
/// before and the average, which is taken in float32, once after. Pays off between hosts; in shared memory the
/// conversion costs more than it saves.
CommHook fp16_compress_hook();
CommHook bf16_compress_hook();

/// The hooks that have a name: "all_reduce", "fp16", "bf16", "int8", "powerSGD" (the last two with their default
/// options; see int8_hook.h and power_sgd.h). A new one is one file and one line in this table.
struct NamedCommHook {
  const char* name;
  const char* summary;
  CommHook (*make)();
};
std::span<const NamedCommHook> comm_hooks() noexcept;
CommHook comm_hook_named(std::string_view name);  ///< throws InvalidArgument, listing the names

/// What this rank has sent to others by a hook, against what the plain average of the same gradients sends: an
/// all_reduce of B bytes over n ranks costs each of them 2 (n-1)/n B. (Ranks of one host exchange the same bytes in
/// shared memory.)
struct HookTraffic {
  std::uint64_t sent_bytes = 0;
  std::uint64_t plain_bytes = 0;

  /// 4 means: a quarter of the bytes. 1 where nothing was sent.
  double compression_rate() const noexcept {
    return sent_bytes == 0 ? 1 : static_cast<double>(plain_bytes) / static_cast<double>(sent_bytes);
  }
};

}  // namespace maniple
