#include <maniple/train/ddp.h>

#include "comm/base/format.h"
#include "train/ddp/reducer.h"

namespace maniple {

NoSync::NoSync(std::shared_ptr<detail::Reducer> reducer) : reducer_(std::move(reducer)) { reducer_->pause(); }
NoSync::~NoSync() { reducer_->resume(); }

namespace {

TensorSource source_of(NamedTensors parameters, NamedTensors buffers) {
  const auto visiting = [](NamedTensors tensors) {
    return [all = std::move(tensors)](const TensorSource::Visit& visit) {
      for (const auto& [name, tensor] : all) visit(name, tensor);
    };
  };
  return {visiting(std::move(parameters)), visiting(std::move(buffers))};
}

/// Holds the module weakly.
TensorSource source_of(const std::weak_ptr<torch::nn::Module>& module) {
  return {[module](const TensorSource::Visit& visit) {
            const auto one = module.lock();
            if (!one) return;
            for (const auto& item : one->named_parameters()) visit(item.key(), item.value());
          },
          [module](const TensorSource::Visit& visit) {
            const auto one = module.lock();
            if (!one) return;
            for (const auto& item : one->named_buffers()) visit(item.key(), item.value());
          }};
}

TensorSource source_of(const torch::jit::Module& module) {
  return {[module](const TensorSource::Visit& visit) {
            for (const auto& item : module.named_parameters()) visit(item.name, item.value);
          },
          [module](const TensorSource::Visit& visit) {
            for (const auto& item : module.named_buffers()) visit(item.name, item.value);
          },
          true};
}

}  // namespace

GradientAverager::GradientAverager(NamedTensors parameters, NamedTensors buffers, DdpOptions options)
    : reducer_(detail::Reducer::make(source_of(std::move(parameters), std::move(buffers)), std::move(options))) {}
GradientAverager::~GradientAverager() = default;
GradientAverager::GradientAverager(GradientAverager&&) noexcept = default;
GradientAverager& GradientAverager::operator=(GradientAverager&&) noexcept = default;

NoSync GradientAverager::no_sync() { return NoSync(reducer_); }
void GradientAverager::set_weight(double weight) { reducer_->set_weight(weight); }
void GradientAverager::register_comm_hook(CommHook hook) { reducer_->register_hook(std::move(hook)); }
void GradientAverager::apply_optimizer_in_backward(const OptimizerFactory& make) { reducer_->make_optimizers(make); }
std::vector<std::shared_ptr<torch::optim::Optimizer>> GradientAverager::optimizers() const {
  return reducer_->optimizers();
}
void GradientAverager::require_unchanged() const { reducer_->require_unchanged(); }
DdpStatistics GradientAverager::statistics() const { return reducer_->statistics(); }
std::vector<torch::Tensor> GradientAverager::trained_parameters() const { return reducer_->trained_parameters(); }
const DdpOptions& GradientAverager::options() const noexcept { return reducer_->options(); }
const std::shared_ptr<ProcessGroup>& GradientAverager::group() const noexcept { return reducer_->group(); }

namespace detail {

DdpBase::DdpBase(const std::shared_ptr<torch::nn::Module>& module, DdpOptions options)
    : ModuleWrapper("DistributedDataParallel", module),
      GradientAverager(Reducer::make(source_of(std::weak_ptr(module)), std::move(options))) {}
DdpBase::~DdpBase() = default;
DdpBase::DdpBase(DdpBase&&) noexcept = default;
DdpBase& DdpBase::operator=(DdpBase&&) noexcept = default;

// Loading replaces the memory of parameters, and LibTorch then drops their hooks.
void DdpBase::load(torch::serialize::InputArchive& archive) {
  ModuleWrapper::load(archive);
  reducer()->attach_hooks();
}

}  // namespace detail

DistributedDataParallel<torch::jit::Module>::DistributedDataParallel(torch::jit::Module module, DdpOptions options)
    : GradientAverager(detail::Reducer::make(source_of(module), std::move(options))), module_(std::move(module)) {}

c10::IValue DistributedDataParallel<torch::jit::Module>::forward(std::vector<c10::IValue> inputs) {
  require_unchanged();
  return module_.forward(std::move(inputs));
}

std::vector<torch::Tensor> DistributedDataParallel<torch::jit::Module>::parameters() const {
  std::vector<torch::Tensor> result;
  for (const auto& parameter : module_.parameters()) result.push_back(parameter);
  return result;
}

std::string DdpStatistics::text() const {
  std::string result = format_text("{} ranks, {} parameters, {:.2f} MiB of gradients in {} bucket{}, overlap {}\n",
                                   ranks, parameters, static_cast<double>(gradient_bytes) / (1024 * 1024),
                                   buckets.size(), buckets.size() == 1 ? "" : "s", overlap);
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    const Bucket& bucket = buckets[i];
    result += format_text("  bucket {}: {} {:.2f} MiB, {} parameters, {} .. {}\n", i, bucket.dtype,
                          static_cast<double>(bucket.bytes) / (1024 * 1024), bucket.parameters.size(),
                          bucket.parameters.front(), bucket.parameters.back());
  }
  result += format_text(
      "  {} synchronised backwards: {:.3f} ms each, {:.3f} ms communicating, {:.3f} ms waiting for it, {:.0f} % "
      "hidden\n",
      backwards, backward_ms, comm_ms, wait_ms, 100 * overlap_fraction());
  return result;
}

}  // namespace maniple
