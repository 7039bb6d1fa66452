// Turns a torch::nn::BatchNorm into a synchronised one although its forward is not virtual: every call ends in
// LibTorch's operator aten::batch_norm, and the kernel of that operator can be replaced. The kernel below finds the
// layer by its weight or running mean. It is installed when the program is loaded, not by the first conversion:
// LibTorch's tables must not change while other threads compute.
#include <torch/library.h>

#include <ATen/ops/batch_norm_native.h>

#include <optional>
#include <unordered_map>

#include "comm/base/check.h"
#include "comm/base/mutex.h"
#include "train/sync_batch_norm/function.h"
#include <maniple/dist.h>
#include <maniple/train/sync_batch_norm.h>
#include <maniple/train/tensor_layout.h>
#include <maniple/train/tensor_nest.h>

namespace maniple {
namespace {

using torch::Tensor;

struct Converted {
  /// Keeps the address, which identifies the layer, from being reused by another tensor.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
  std::weak_ptr<torch::nn::Module> module;  // its mode decides which statistics are used
  std::weak_ptr<ProcessGroup> group;        // weak: this table outlives the program's objects
  bool default_group;

  std::shared_ptr<ProcessGroup> current_group() const {
    if (default_group) return get_default_group();
    auto held = group.lock();
    MANIPLE_REQUIRE(
        held != nullptr,
        "convert_sync_batchnorm: the group of this batch norm does not exist any more; keep it as long as the "
        "module trains");
    return held;
  }
};

class Table {
 public:
  void set(const Tensor& tensor, Converted entry) {
    const MutexLock lock(mutex_);
    std::erase_if(entries_, [](const auto& item) { return item.second.module.expired(); });
    entries_.insert_or_assign(tensor.unsafeGetTensorImpl(), std::move(entry));
  }
  std::optional<Converted> find(const Tensor& tensor) const {
    if (!tensor.defined()) return std::nullopt;
    const MutexLock lock(mutex_);
    const auto found = entries_.find(tensor.unsafeGetTensorImpl());
    if (found == entries_.end()) return std::nullopt;
    return found->second;
  }

 private:
  mutable ForkSafeMutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Converted> entries_ MANIPLE_GUARDED_BY(mutex_);
};

/// Never destroyed: modules may compute until the process ends.
Table& table() {
  static Table* const the_table = new Table;
  return *the_table;
}

std::optional<Converted> find(const Tensor& weight, const Tensor& running_mean) {
  auto found = table().find(weight);
  return found ? found : table().find(running_mean);
}

Tensor batch_norm(const Tensor& input, const detail::TorchOptional<Tensor>& weight,
                  const detail::TorchOptional<Tensor>& bias, const detail::TorchOptional<Tensor>& running_mean,
                  const detail::TorchOptional<Tensor>& running_var, bool training, double momentum, double eps,
                  bool cudnn_enabled) {
  const auto tensor = [](const detail::TorchOptional<Tensor>& optional) { return optional ? *optional : Tensor(); };
  if (training) {
    if (const auto found = find(tensor(weight), tensor(running_mean))) {
      const auto module = found->module.lock();
      if (module != nullptr && module->is_training()) {
        const BatchNormTensors own{tensor(weight), tensor(bias), tensor(running_mean), tensor(running_var)};
        return sync_batch_norm(input, own, momentum, eps, found->current_group());
      }
    }
  }
  return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled);
}

// For all dispatch keys that a group's ranks may use, with and without autograd (inference mode).
TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { library.impl("batch_norm", &batch_norm); }
TORCH_LIBRARY_IMPL(aten, CPU, library) { library.impl("batch_norm", &batch_norm); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { library.impl("batch_norm", &batch_norm); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("batch_norm", &batch_norm); }

struct Layer {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  Tensor weight, running_mean;
};

/// Reads the tensors of a torch::nn::BatchNorm; returns false for other modules.
template <class... Kinds>
bool read_batch_norm(torch::nn::Module& module, Layer& layer) {
  const auto read = [&](auto* batch_norm) {
    if (batch_norm == nullptr) return false;
    layer.weight = batch_norm->weight;
    layer.running_mean = batch_norm->running_mean;
    return true;
  };
  return (read(dynamic_cast<Kinds*>(&module)) || ...);
}
bool is_batch_norm(torch::nn::Module& module, Layer& layer) {
  return read_batch_norm<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl>(module,
                                                                                                             layer);
}

bool is_known_otherwise(const torch::nn::Module& module) {
  return dynamic_cast<const nn::SyncBatchNormImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::InstanceNorm1dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::InstanceNorm2dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::InstanceNorm3dImpl*>(&module) != nullptr;
}

std::string shown(const std::string& name) { return name.empty() ? "the module itself" : name; }

/// Throws if the layer cannot be converted.
void require_convertible(const Layer& layer) {
  MANIPLE_REQUIRE(layer.weight.defined() || layer.running_mean.defined(),
                  "convert_sync_batchnorm: {} has neither affine parameters nor running statistics and cannot be "
                  "converted; declare it as maniple::nn::SyncBatchNorm",
                  shown(layer.name));
  MANIPLE_REQUIRE(
      !layer.weight.defined() || maniple::layout_of(layer.weight).kind != LayoutKind::fully_sharded,
      "convert_sync_batchnorm: the parameters of {} are {}; convert the module first and call fully_shard then",
      shown(layer.name), maniple::layout_of(layer.weight).text());
  const Tensor& known_by = layer.weight.defined() ? layer.weight : layer.running_mean;
  MANIPLE_REQUIRE(known_by.is_cpu() || known_by.is_cuda(), "convert_sync_batchnorm: {} is on {}; expected cpu or cuda",
                  shown(layer.name), known_by.device().str());
}

}  // namespace

std::vector<std::string> convert_sync_batchnorm(const std::shared_ptr<torch::nn::Module>& module,
                                                const std::shared_ptr<ProcessGroup>& group) {
  MANIPLE_REQUIRE(module != nullptr, "convert_sync_batchnorm: the module is null");
  if (group) group->require_member("convert_sync_batchnorm");
  std::vector<Layer> layers;
  for (const auto& item : module->named_modules()) {
    Layer layer{item.key(), item.value(), {}, {}};
    if (is_batch_norm(*item.value(), layer)) {
      require_convertible(layer);
      layers.push_back(std::move(layer));
      continue;
    }
    const auto buffers = item.value()->named_buffers(/*recurse=*/false);
    MANIPLE_REQUIRE(
        is_known_otherwise(*item.value()) || !buffers.contains("running_mean") || !buffers.contains("running_var"),
        "convert_sync_batchnorm: {} is of the class {}, which looks like batch norm but is not one of LibTorch's; "
        "declare it as maniple::nn::SyncBatchNorm",
        shown(item.key()), item.value()->name());
  }
  std::vector<std::string> names;
  for (const Layer& layer : layers) {
    for (const Tensor& tensor : {layer.weight, layer.running_mean}) {
      if (!tensor.defined()) continue;
      table().set(tensor,
                  {decltype(Converted::tensor)(tensor.getIntrusivePtr()), layer.module, group, group == nullptr});
    }
    names.push_back(layer.name);
  }
  return names;
}

std::vector<std::string> synchronised_in(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_modules()) {
    Layer layer;
    const bool converted = is_batch_norm(*item.value(), layer) && find(layer.weight, layer.running_mean).has_value();
    if (converted || item.value()->as<nn::SyncBatchNorm>() != nullptr) names.push_back(shown(item.key()));
  }
  return names;
}

}  // namespace maniple

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
  const auto ranks = group != nullptr ? group : get_default_group();
  ranks->require_member("SyncBatchNorm");
  double momentum = options.momentum().value_or(0);
  if (tracks) {
    num_batches_tracked += 1;
    if (!options.momentum().has_value()) momentum = 1 / num_batches_tracked.item<double>();
  }
  return sync_batch_norm(input, own, momentum, options.eps(), ranks);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << format_text("maniple::nn::SyncBatchNorm({}, eps={}, affine={}, track_running_stats={})",
                        options.num_features(), options.eps(), options.affine(), options.track_running_stats());
}

}  // namespace maniple::nn
