#include <maniple/train/module_wrapper.h>

#include <optional>

#include "comm/base/check.h"

namespace maniple::detail {
namespace {

/// Integers are not converted between floating-point types, so only the device matters for them.
bool differs(const torch::Tensor& tensor, std::optional<torch::Device> device, std::optional<torch::Dtype> dtype) {
  if (!tensor.defined()) return false;
  const torch::Device own = tensor.device();
  const bool moves = device && (own.type() != device->type() || (device->has_index() && own != *device));
  const bool converts = dtype && (tensor.is_floating_point() || tensor.is_complex()) && tensor.scalar_type() != *dtype;
  return moves || converts;
}

void require_same(const torch::nn::Module& wrapper, std::optional<torch::Device> device,
                  std::optional<torch::Dtype> dtype) {
  for (const auto& named : {wrapper.named_parameters(), wrapper.named_buffers()}) {
    for (const auto& item : named) {
      MANIPLE_REQUIRE(
          !differs(item.value(), device, dtype),
          "{}: to() cannot change the device or dtype of a wrapped module ({} is {} on {}): its hooks, buckets "
          "and replicas were made for it; convert the module first and wrap it then",
          wrapper.name(), item.key(), c10::toString(item.value().scalar_type()), item.value().device().str());
    }
  }
}

}  // namespace

ModuleWrapper::ModuleWrapper(const char* name, std::shared_ptr<torch::nn::Module> module)
    : torch::nn::Module(name), wrapped_(std::move(module)) {
  MANIPLE_REQUIRE(wrapped_ != nullptr, "{}: the module is null", name);
  register_module("module", wrapped_);
}

bool ModuleWrapper::is_training() const noexcept { return wrapped_->is_training(); }

void ModuleWrapper::to(torch::Device device, torch::Dtype dtype, bool) { require_same(*this, device, dtype); }
void ModuleWrapper::to(torch::Dtype dtype, bool) { require_same(*this, std::nullopt, dtype); }
void ModuleWrapper::to(torch::Device device, bool) { require_same(*this, device, std::nullopt); }

}  // namespace maniple::detail
