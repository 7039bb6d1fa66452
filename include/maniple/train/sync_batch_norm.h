// Batch norm over the batches of all ranks.
//
// Plain batch norm normalises each rank's part of the batch by that part's own mean and variance: with few samples on a
// rank they are noisy. Synchronised, the ranks exchange their statistics, and the result, forward and backward and in
// the running statistics, is that of plain batch norm on the whole batch.
//
//   auto net = std::make_shared<Net>();            // has torch::nn::BatchNorm2d members, or in Sequentials
//   maniple::convert_sync_batchnorm(net);          // now they are synchronised
//   maniple::DistributedDataParallel<Net> ddp(net);
//
// or, in a module that is written for it:
//
//   maniple::nn::SyncBatchNorm norm = register_module("norm", maniple::nn::SyncBatchNorm(64));
//
// What happens. In training, forward exchanges one number of values and 2 C statistics (one all_gather, on the CPU in
// double precision), backward 2 C sums (one all_reduce; none if the input needs no gradient). On a GPU the host waits
// for neither, but for two cases: a rank with one value per channel or none looks whether all together have more, and a
// momentum of nullopt, as in LibTorch, reads the number of batches. Means and variances are combined with their counts,
// so ranks may have different numbers of rows, and a rank may have none: it must take part nevertheless, in forward and
// backward. All ranks run the same synchronised layers in the same order. In evaluation, and in a group of one rank, it
// is plain batch norm and nothing is exchanged.
//
// Gradients of weight and bias are the rank's own share of their sum over the batch: DistributedDataParallel makes of
// them what it makes of all gradients (the average). The gradient of the input is that of the sum of all ranks' losses,
// which is what this average needs.
//
// float32, float64, and bfloat16 or float16, which are computed in float32; any strides; (N, C) and (N, C, ...).
//
// Errors. InvalidArgument for a wrong shape, and "Expected more than 1 value per channel" when the whole batch has but
// one; what dist.h says for ranks that disagree or die. Unsupported for backward with create_graph.
#pragma once

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {
namespace nn {

/// As torch::nn::BatchNorm1d, 2d and 3d in one: options, members and the names of parameters and buffers are theirs, so
/// checkpoints fit both.
class SyncBatchNormImpl : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  /// `like`: the number of channels, or torch::nn::BatchNormOptions(channels).eps(...).momentum(...) and so on. A
  /// momentum of nullopt: running statistics are the plain mean over all batches so far. A null group is the default
  /// group at the time of forward.
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& like, std::shared_ptr<ProcessGroup> given = nullptr)
      : NormImplBase(like), group(std::move(given)) {}

  torch::Tensor forward(const torch::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  std::shared_ptr<ProcessGroup> group;

 protected:
  void _check_input_dim(const torch::Tensor& input) override;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace nn

/// Synchronises every BatchNorm1d, 2d and 3d in the module, wherever it is held: as a member, in a Sequential, in a
/// list. The modules stay the same objects, with the same parameters, buffers and names; what changes is how they
/// compute in training. Returns their names. Communicates nothing. Converting again, with another group, is fine.
///
/// A null group is the default group at the time of forward. Another one is not kept alive by the conversion: hold it
/// as long as the module trains.
///
/// Every one is converted or named in an error (InvalidArgument, and then nothing was changed). It cannot be done for
///   - batch norm with neither affine parameters nor running statistics: there is nothing to know it by; declare it as
///     maniple::nn::SyncBatchNorm;
///   - modules of other classes that have a running_mean and a running_var: what they compute is unknown.
/// Two limits: a clone() of a converted module is not converted, convert it as well; and a rank must not have exactly
/// one value per channel (LibTorch's BatchNorm refuses that before it computes; SyncBatchNorm does not mind).
///
/// How. BatchNorm::forward is not virtual and a member cannot be replaced by one of another type, so the conversion is
/// one step below: LibTorch's operator aten::batch_norm is given a kernel that knows converted layers by their tensors,
/// computes these together with the other ranks, and all others as before.
std::vector<std::string> convert_sync_batchnorm(const std::shared_ptr<torch::nn::Module>& module,
                                                const std::shared_ptr<ProcessGroup>& group = nullptr);
template <class Contained>
std::vector<std::string> convert_sync_batchnorm(const torch::nn::ModuleHolder<Contained>& holder,
                                                const std::shared_ptr<ProcessGroup>& group = nullptr) {
  return convert_sync_batchnorm(std::shared_ptr<torch::nn::Module>(holder.ptr()), group);
}

}  // namespace maniple
