// The parameters and buffers of a model: DistributedDataParallel's state for each, the check that all ranks have the
// same, and the copying of one rank's tensors to all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <torch/torch.h>
#include <torch/types.h>

#include "train/packed_layout.h"
#include "train/tensor/torch_compat.h"
#include <maniple/comm/process_group.h>
#include <maniple/train/ddp.h>

namespace maniple {

struct NamedTensor {
  std::string name;
  torch::Tensor tensor;
};

struct ModuleTensors {
  std::vector<NamedTensor> trained;  ///< parameters that require a gradient
  std::vector<NamedTensor> frozen;   ///< parameters that do not require a gradient
  std::vector<NamedTensor> buffers;
};

/// The source of a model's tensors: a module, a scripted module, or lists.
struct TensorSource {
  using Visit = std::function<void(const std::string& name, const torch::Tensor& tensor)>;
  std::function<void(const Visit&)> parameters;  ///< visits the parameters of that moment
  std::function<void(const Visit&)> buffers;
  bool replaces_buffers = false;  ///< forward may replace buffers by other tensors, as assignments in a script do
};

/// The beginning of messages: "[DistributedDataParallel world rank 1/4] ".
std::string ddp_prefix(const ProcessGroup& group);

/// In the order of registration; a tensor registered twice appears once, under its first name.
ModuleTensors tensors_of(const TensorSource& source);
/// The buffers alone.
std::vector<torch::Tensor> buffers_of(const TensorSource& source);

/// Throws InvalidArgument if DdpOptions::device_ids does not match the devices of the parameters.
void require_device_ids(const std::vector<int>& device_ids, const ModuleTensors& tensors);

/// Compares lines that must be the same on all ranks and returns the first difference: "ranks 0, 2 have A; rank 1 has
/// B"; empty if there is none. The result is the same on all ranks. Collective.
std::string first_difference(ProcessGroup& group, const std::vector<std::string>& lines);

/// Throws InvalidArgument, on all ranks alike, unless all ranks have the same options, parameters and buffers. The
/// error text gives the first difference and each rank's value. Collective.
void require_same_on_all_ranks(ProcessGroup& group, const DdpOptions& options, const ModuleTensors& tensors);

/// A parameter that requires a gradient.
struct Parameter {
  explicit Parameter(NamedTensor named)
      : name(std::move(named.name)),
        tensor(std::move(named.tensor)),
        dtype(tensor.scalar_type()),
        device(tensor.device()) {}

  std::string name;
  torch::Tensor tensor;
  torch::ScalarType dtype;                             ///< at construction
  torch::Device device;                                ///< at construction
  std::optional<GradientHook> hook;                    ///< calls the reducer when autograd has computed the gradient
  std::shared_ptr<torch::optim::Optimizer> optimizer;  ///< applied in backward; null: the program steps the parameter

  std::size_t bucket = 0;  ///< its bucket, once buckets are laid out
  std::size_t place = 0;   ///< its index in the bucket
  bool delayed = false;    ///< see delayed_gradients.h

  bool expected = true;      ///< static_graph: got a gradient in the first backward
  bool used = true;          ///< find_unused_parameters, static_graph: got a gradient on any rank
  bool accumulated = false;  ///< got a gradient under no_sync since the last synchronised backward
  bool kept = false;         ///< the same, and Reducer::keep_gradients() has taken it

  // State of the backward under way.
  enum class Gradient : std::uint8_t {
    absent,
    early,  ///< a delayed parameter's gradient, computed before the first other gradient of the backward
    ready,  ///< computed
  };
  Gradient gradient = Gradient::absent;
  torch::Tensor saved;  ///< the earlier gradient, if this rank has computed none

  bool ready() const noexcept { return gradient == Gradient::ready; }

  /// Describes the change and what to do if the parameter was frozen, converted or given other memory; otherwise empty.
  std::string conversion() const;
};

/// Makes the optimizer of one parameter by the program's factory. Throws InvalidArgument if it cannot step alone.
std::shared_ptr<torch::optim::Optimizer> make_optimizer(const OptimizerFactory& make, const Parameter& parameter);

/// Sets `used` for each parameter that has a gradient on any rank. Collective: one all_reduce with one byte per
/// parameter.
void exchange_used(ProcessGroup& group, std::span<Parameter> parameters, const std::vector<bool>& used_here);

/// "fc2.weight, fc2.bias and 3 more".
std::string names_of(const std::vector<const Parameter*>& parameters);

/// Copies one rank's tensors to all ranks: parameters and buffers at construction, buffers after every backward.
///
/// Tensors without gaps are moved as blocks of memory, in the order of their strides (which are the same on all ranks).
/// Large tensors are broadcast in place. Small ones are packed into one block of registered memory, so that a hundred
/// running means cost one operation. Autograd is not notified: running statistics may safely change between forward and
/// backward.
class Replicator {
 public:
  Replicator(std::shared_ptr<ProcessGroup> group, std::vector<torch::Tensor> tensors);
  bool empty() const noexcept { return tensors_.empty(); }
  /// Collective. The first call allocates.
  void copy_from(int root);
  /// Replaces the tensors. Does nothing and returns false unless the new ones have the same sizes, strides and dtypes.
  bool replace(const std::vector<torch::Tensor>& tensors);

 private:
  /// The small tensors of one device and dtype, and their places in one block of memory.
  struct Pack {
    std::vector<std::size_t> indices;  ///< indices of its tensors among all tensors
    std::vector<torch::Tensor> tensors;
    std::vector<torch::Tensor> places;
    /// In bytes, without padding: counters of 8 bytes would take 64 bytes each, after every backward, and they are only
    /// copied.
    PackedLayout layout{1, 1};
    Buffer all;
  };
  void lay_out();
  void find_memory();

  std::shared_ptr<ProcessGroup> group_;
  std::vector<torch::Tensor> tensors_;
  bool laid_out_ = false;
  std::vector<Pack> packs_;
  std::vector<std::size_t> single_;  // indices of the tensors that are broadcast in place
};

}  // namespace maniple
