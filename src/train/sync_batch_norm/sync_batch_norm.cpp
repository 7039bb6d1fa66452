#include <maniple/train/sync_batch_norm.h>

#include "base/check.h"
#include "train/sync_batch_norm/function.h"
#include <maniple/dist.h>

namespace maniple::nn {

void SyncBatchNormImpl::_check_input_dim(const torch::Tensor& input) {
  MANIPLE_REQUIRE(input.dim() >= 2, "SyncBatchNorm: expected an input of two dimensions or more, (N, C, ...), got [{}]",
                  joined(input.sizes()));
  MANIPLE_REQUIRE(input.size(1) == options.num_features() && input.size(1) > 0,
                  "SyncBatchNorm: expected {} channels in dimension 1, got [{}]", options.num_features(),
                  joined(input.sizes()));
}

torch::Tensor SyncBatchNormImpl::forward(const torch::Tensor& input) {
  _check_input_dim(input);
  const BatchNormTensors own{weight, bias, running_mean, running_var};
  const bool tracks = options.track_running_stats();
  if (!is_training()) return plain_batch_norm(input, own, !tracks, 0, options.eps());
  const auto group = process_group != nullptr ? process_group : get_default_group();
  group->require_member("SyncBatchNorm");
  double momentum = options.momentum().value_or(0);
  if (tracks) {
    num_batches_tracked += 1;
    if (!options.momentum().has_value()) momentum = 1 / num_batches_tracked.item<double>();
  }
  return sync_batch_norm(input, own, momentum, options.eps(), group);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << format_text("maniple::nn::SyncBatchNorm({}, eps={}, affine={}, track_running_stats={})",
                        options.num_features(), options.eps(), options.affine(), options.track_running_stats());
}

}  // namespace maniple::nn
