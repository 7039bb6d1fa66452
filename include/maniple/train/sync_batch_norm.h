// Batch normalisation over the batches of all ranks.
//
// Plain batch norm normalises each rank's part of the batch with the mean and variance of that part, which are noisy if
// a rank has few samples. With synchronised batch norm the ranks exchange their statistics. Results of forward and
// backward, and the running statistics, then equal plain batch norm on the whole batch.
//
//   auto net = std::make_shared<Net>();            // has torch::nn::BatchNorm2d as members, or in Sequentials
//   maniple::convert_sync_batchnorm(net);          // now they are synchronised
//   maniple::DistributedDataParallel<Net> ddp(net);
//
// In a module of your own:
//
//   maniple::nn::SyncBatchNorm norm = register_module("norm", maniple::nn::SyncBatchNorm(64));
//
// Communication. In training, forward exchanges a count and 2 C statistics (one all_gather, on the CPU in double
// precision), backward 2 C sums (one all_reduce; none if the input needs no gradient). On a GPU the host does not wait,
// with two exceptions: a rank with at most one value per channel checks whether all ranks together have more, and a
// momentum of nullopt reads the batch counter, as in LibTorch. Means and variances are weighted by their counts, so
// ranks may have different numbers of rows. A rank with no rows must still take part, in forward and backward. All
// ranks run the same synchronised layers in the same order. In evaluation, and in a group of one rank, it is plain
// batch norm without communication.
//
// Gradients. The gradients of weight and bias are this rank's share of the sum over the batch; DistributedDataParallel
// averages them like all gradients. The input's gradient is the gradient of the sum of all ranks' losses, as this
// average requires.
//
// Inputs: float32 and float64, and bfloat16 or float16, which are computed in float32; any strides; shapes (N, C) and
// (N, C, ...).
//
// Errors. A wrong shape throws InvalidArgument, and so does a whole batch with only one value per channel ("Expected
// more than 1 value per channel"). Ranks that disagree or die cause the errors described in dist.h. Backward with
// create_graph throws Unsupported.
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

/// Replaces torch::nn::BatchNorm1d, 2d and 3d. It has the same options, members, and names of parameters and buffers,
/// so checkpoints are interchangeable.
class SyncBatchNormImpl : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  /// `like`: the number of channels, or torch::nn::BatchNormOptions(channels).eps(...).momentum(...) and so on. With a
  /// momentum of nullopt, running statistics are the plain mean over all batches so far. A null group means the default
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

/// Synchronises every BatchNorm1d, 2d and 3d in the module: members, and layers in a Sequential or a list. They remain
/// the same objects with the same parameters, buffers and names; only their computation in training changes. Returns
/// their names. Does not communicate. May be called again with another group.
///
/// A null group means the default group at the time of forward. Any other group is not kept alive by the conversion:
/// hold it as long as the module trains.
///
/// Every batch norm layer is either converted or named in an error (InvalidArgument; nothing is changed then). Not
/// convertible:
/// - batch norm with neither affine parameters nor running statistics, because it cannot be recognized; declare it as
///   maniple::nn::SyncBatchNorm;
/// - modules of other classes with a running_mean and a running_var, because their computation is unknown.
/// Two limits: a clone() of a converted module is not converted; convert the clone as well. And no rank may have
/// exactly one value per channel (LibTorch's BatchNorm rejects it before computing; SyncBatchNorm accepts it).
///
/// Implementation. BatchNorm::forward is not virtual, and a member cannot be replaced by an object of another type.
/// Therefore the conversion registers a kernel for LibTorch's operator aten::batch_norm. The kernel recognizes
/// converted layers by their tensors and computes them together with the other ranks; for all other layers it behaves
/// as before.
std::vector<std::string> convert_sync_batchnorm(const std::shared_ptr<torch::nn::Module>& module,
                                                const std::shared_ptr<ProcessGroup>& group = nullptr);
template <class Contained>
std::vector<std::string> convert_sync_batchnorm(const torch::nn::ModuleHolder<Contained>& holder,
                                                const std::shared_ptr<ProcessGroup>& group = nullptr) {
  return convert_sync_batchnorm(std::shared_ptr<torch::nn::Module>(holder.ptr()), group);
}

}  // namespace maniple
