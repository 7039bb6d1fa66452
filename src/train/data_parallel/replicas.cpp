#include "train/data_parallel/replicas.h"

#include <map>

#include "comm/base/check.h"

namespace maniple {
namespace {

using torch::Tensor;

template <class Named>
std::vector<Tensor> defined_tensors(const Named& named) {
  std::vector<Tensor> result;
  for (const auto& item : named) {
    if (item.value().defined()) result.push_back(item.value());
  }
  return result;
}

std::string shape_of(const Tensor& tensor) {
  return format_text("{} [{}]", c10::toString(tensor.scalar_type()), joined(tensor.sizes()));
}

bool same_memory(const Tensor& a, const Tensor& b) {
  return a.data_ptr() == b.data_ptr() && a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.device() == b.device();
}

/// Makes `mirror` share the memory of `original`.
void share(Tensor& mirror, const Tensor& original) {
  if (!same_memory(mirror, original)) mirror.set_data(original.variable_data());
}

/// Copies the values of `original` to `mirror`. Autograd is not notified: graphs of an earlier forward stay valid,
/// since they hold the same values.
void copy(Tensor& mirror, const Tensor& original, torch::Device device) {
  const bool fits =
      mirror.device() == device && mirror.sizes() == original.sizes() && mirror.scalar_type() == original.scalar_type();
  if (fits) {
    mirror.variable_data().copy_(original.variable_data(), /*non_blocking=*/true);
  } else {
    mirror.set_data(original.variable_data().to(original.options().device(device), false, /*copy=*/true));
  }
}

}  // namespace

Replicas::Replicas(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options,
                   const detail::DataParallelBase::Factory& make)
    : original_(std::move(module)),
      devices_(options.devices),
      modules_(original_->modules()),
      parameters_(defined_tensors(original_->named_parameters())),
      buffers_(defined_tensors(original_->named_buffers())) {
  const auto require_here = [&](const char* kind, const auto& named) {
    for (const auto& item : named) {
      if (!item.value().defined()) continue;
      MANIPLE_REQUIRE(item.value().device() == devices_[0],
                      "DataParallel: {} {} is on {}, but the first device is {}; move the module there first: "
                      "module->to(device)",
                      kind, item.key(), item.value().device().str(), devices_[0].str());
    }
  };
  require_here("parameter", original_->named_parameters());
  require_here("buffer", original_->named_buffers());
  std::map<const void*, std::size_t> seen;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    first_.push_back(seen.emplace(parameters_[i].unsafeGetTensorImpl(), i).first->second);
  }
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    auto one = make_one(i, make);
    copies_.push_back({one, devices_[i], i == 0 || (options.share_parameters && devices_[i] == devices_[0]),
                       one->modules(), defined_tensors(one->named_parameters()),
                       defined_tensors(one->named_buffers())});
    require_alike(i);
  }
  refresh(copies_.size());
}

std::shared_ptr<torch::nn::Module> Replicas::make_one(std::size_t index,
                                                      const detail::DataParallelBase::Factory& make) const {
  std::shared_ptr<torch::nn::Module> one;
  if (make) {
    one = make();
    MANIPLE_REQUIRE(one != nullptr, "DataParallel: the factory returned null");
    MANIPLE_REQUIRE(one != original_, "DataParallel: the factory returned the module itself; it must make another");
    one->to(devices_[index]);
    return one;
  }
  try {
    return original_->clone(devices_[index]);
  } catch (const c10::Error& error) {
    throw InvalidArgument(format_text(
        "DataParallel: the module {} cannot be cloned: {}; make every module in it a torch::nn::Cloneable that creates "
        "what it registers in reset(), or give DataParallel a factory",
        original_->name(), error.what_without_backtrace()));
  }
}

void Replicas::require_alike(std::size_t index) const {
  const Copy& one = copies_[index];
  const auto compare = [&](const char* kind, const std::vector<Tensor>& own, const std::vector<Tensor>& expected,
                           const auto& names) {
    MANIPLE_REQUIRE(own.size() == expected.size(), "DataParallel: replica {} has {} {}s, the module has {}", index,
                    own.size(), kind, expected.size());
    for (std::size_t i = 0; i < own.size(); ++i) {
      MANIPLE_REQUIRE(own[i].sizes() == expected[i].sizes() && own[i].scalar_type() == expected[i].scalar_type(),
                      "DataParallel: {} {} is {} in the module, but {} in replica {}", kind, names[i].key(),
                      shape_of(expected[i]), shape_of(own[i]), index);
      MANIPLE_REQUIRE(!own[i].is_same(expected[i]),
                      "DataParallel: {} {} of replica {} is the module's own tensor; what the module registers must be "
                      "created anew in reset(), or by the factory",
                      kind, names[i].key(), index);
    }
  };
  MANIPLE_REQUIRE(one.modules.size() == modules_.size(), "DataParallel: replica {} has {} modules in it, the module {}",
                  index, one.modules.size(), modules_.size());
  compare("parameter", one.parameters, parameters_, original_->named_parameters());
  compare("buffer", one.buffers, buffers_, original_->named_buffers());
}

void Replicas::refresh(std::size_t count) {
  const c10::InferenceMode ordinary_tensors(false);
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < count; ++i) {
    Copy& one = copies_[i];
    for (std::size_t k = 0; k < modules_.size(); ++k) {  // parents precede their children
      const bool on = modules_[k]->is_training();
      if (one.modules[k]->is_training() != on) one.modules[k]->train(on);
    }
    for (std::size_t k = 0; k < parameters_.size(); ++k) {
      Tensor& own = one.parameters[k];
      if (own.requires_grad() != parameters_[k].requires_grad()) own.set_requires_grad(!own.requires_grad());
      one.shares_parameters ? share(own, parameters_[k]) : copy(own, parameters_[k], one.device);
    }
    for (std::size_t k = 0; k < buffers_.size(); ++k) {
      i == 0 ? share(one.buffers[k], buffers_[k]) : copy(one.buffers[k], buffers_[k], one.device);
    }
  }
}

std::vector<Tensor> Replicas::trained() const {
  std::vector<Tensor> result;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (first_[i] == i && parameters_[i].requires_grad()) result.push_back(parameters_[i]);
  }
  return result;
}

std::vector<std::vector<Tensor>> Replicas::trained_of(std::size_t replica) const {
  const std::vector<Tensor>& own = copies_[replica].parameters;
  std::vector<std::vector<Tensor>> result;
  std::map<std::size_t, std::size_t> place;  // place in `result`, by the parameter's first appearance
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (!parameters_[i].requires_grad()) continue;
    const auto [found, is_new] = place.emplace(first_[i], result.size());
    if (is_new) result.emplace_back();
    auto& same = result[found->second];
    bool known = false;
    for (const Tensor& other : same) known = known || other.is_same(own[i]);
    if (!known) same.push_back(own[i]);
  }
  return result;
}

}  // namespace maniple
