#include <maniple/train/data_parallel.h>

#include <algorithm>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "comm/base/check.h"
#include "comm/base/mutex.h"
#include "train/data_parallel/gather.h"
#include "train/data_parallel/replicas.h"
#include "train/sync_batch_norm/function.h"
#include "train/tensor_layout.h"

namespace maniple {
namespace {

using torch::Tensor;

torch::Device checked(torch::Device device, const std::string& what) {
  if (device.is_cpu()) {
    MANIPLE_REQUIRE(!device.has_index() || device.index() == 0,
                    "DataParallel: {} is {}, but the CPU is one device; name cpu several times to use several cores",
                    what, device.str());
    return torch::kCPU;
  }
  if (!device.is_cuda()) {
    throw Unsupported(format_text("DataParallel: {} is {}; replicas can be on cpu and cuda", what, device.str()));
  }
  MANIPLE_REQUIRE(torch::cuda::is_available(), "DataParallel: {} is {}, but this LibTorch finds no CUDA device", what,
                  device.str());
  if (!device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  const auto count = static_cast<int>(torch::cuda::device_count());
  MANIPLE_REQUIRE(device.index() < count, "DataParallel: {} is {}, but there are {} CUDA devices", what, device.str(),
                  count);
  return device;
}

DataParallelOptions checked(DataParallelOptions options) {
  MANIPLE_REQUIRE(!options.devices.empty(),
                  "DataParallel: no devices; name at least one, such as {{.devices = {{torch::kCPU, torch::kCPU}}}}");
  for (std::size_t i = 0; i < options.devices.size(); ++i) {
    options.devices[i] = checked(options.devices[i], format_text("devices[{}]", i));
  }
  options.output_device =
      options.output_device ? checked(*options.output_device, "output_device") : options.devices.front();
  MANIPLE_REQUIRE(options.threads >= 0, "DataParallel: {} threads; expected 0 or more", options.threads);
  return options;
}

/// The parts of all tensors, by replica. There are as many replicas as parts; one if there is nothing to cut.
std::vector<Tensors> scatter(const Tensors& inputs, std::int64_t dim, std::size_t replicas) {
  std::vector<Tensors> parts;
  std::size_t first = inputs.size();
  std::int64_t rows = 0;
  for (std::size_t k = 0; k < inputs.size(); ++k) {
    if (!inputs[k].defined()) continue;
    const std::int64_t dims = inputs[k].dim();
    MANIPLE_REQUIRE(dims > 0,
                    "DataParallel: tensor {} of the arguments has no dimensions and cannot be cut; pass a number", k);
    MANIPLE_REQUIRE(dim < dims && dim >= -dims,
                    "DataParallel: tensor {} of the arguments, [{}], has no dimension {} to cut it along", k,
                    joined(inputs[k].sizes()), dim);
    if (first == inputs.size()) {
      first = k;
      rows = inputs[k].size(dim);
    }
    MANIPLE_REQUIRE(
        inputs[k].size(dim) == rows,
        "DataParallel: tensor {} of the arguments has {} rows in dimension {}, tensor {} has {}; all must be "
        "of the same batch",
        first, rows, dim, k, inputs[k].size(dim));
  }
  if (rows <= 1 || replicas == 1) return {inputs};
  const torch::NoGradGuard no_grad;
  for (std::size_t k = 0; k < inputs.size(); ++k) {
    if (!inputs[k].defined()) continue;
    const auto chunks = inputs[k].detach().chunk(static_cast<std::int64_t>(replicas), dim);
    parts.resize(chunks.size(), Tensors(inputs.size()));
    for (std::size_t i = 0; i < chunks.size(); ++i) parts[i][k] = chunks[i];
  }
  return parts;
}

}  // namespace

namespace detail {

class DataParallelBase::State {
 public:
  State(std::shared_ptr<torch::nn::Module> module, DataParallelOptions given, const Factory& make)
      : options(std::move(given)), replicas(std::move(module), options, make) {
    if (options.devices.size() > 1) threads = std::make_shared<ReplicaThreads>(options.devices, options.threads);
  }

  Tensors apply(const Tensors& inputs, const Call& call) {
    const std::vector<Tensors> parts = scatter(inputs, options.dim, options.devices.size());
    if (parts.size() == 1) return alone(inputs, call);
    threads->require_outside();
    const bool grad = torch::GradMode::is_enabled();
    GatherTargets targets;
    std::vector<ReplicaGraph> graphs(parts.size());
    {
      const MutexLock lock(mutex);
      replicas.refresh(parts.size());
      if (grad) {
        targets.parameters = replicas.trained();
        for (std::size_t i = 0; i < graphs.size(); ++i) graphs[i].parameters = replicas.trained_of(i);
        for (const Tensor& input : inputs) {
          if (input.defined() && input.requires_grad()) targets.inputs.push_back(input);
        }
      }
      threads->run(parts.size(), "forward", [&](std::size_t i) {
        Tensors own = parts[i];
        for (std::size_t k = 0; k < own.size(); ++k) {
          if (!own[k].defined()) continue;
          own[k] = own[k].to(options.devices[i], /*non_blocking=*/true);
          if (!grad || !inputs[k].requires_grad()) continue;
          own[k].set_requires_grad(true);
          graphs[i].inputs.push_back(own[k]);
        }
        graphs[i].outputs = call(replicas[i], i, own);
      });
    }
    return gather(threads, std::move(graphs), {options.dim, *options.output_device}, targets);
  }

  DataParallelOptions options;
  Replicas replicas;

 private:
  /// Runs a single part: the module itself, in the caller's thread and graph.
  Tensors alone(Tensors inputs, const Call& call) {
    for (Tensor& input : inputs) {
      if (input.defined()) input = input.to(options.devices[0]);
    }
    Tensors outputs = call(replicas.original(), 0, inputs);
    for (Tensor& output : outputs) {
      if (!output.defined()) continue;
      output = output.to(*options.output_device);
      if (output.dim() == 0 && options.devices.size() > 1) output = output.unsqueeze(0);  // as with several parts
    }
    return outputs;
  }

  Mutex mutex;                              // serialises use of the replicas
  std::shared_ptr<ReplicaThreads> threads;  // null with one device; graphs hold it, too
};

DataParallelBase::DataParallelBase(const std::shared_ptr<torch::nn::Module>& module, DataParallelOptions options,
                                   const Factory& make)
    : ModuleWrapper("DataParallel", module) {
  const std::vector<std::string> synchronised = synchronised_in(*module);
  if (!synchronised.empty()) {
    throw Unsupported(
        format_text("DataParallel: {} is synchronised batch norm, which works between processes; use it with "
                    "DistributedDataParallel, or plain batch norm here",
                    synchronised.front()));
  }
  detail::require_whole(*module, "DataParallel",
                        "its replicas are threads of one rank; use DistributedDataParallel or the layer's own group");
  state_ = std::make_shared<State>(module, checked(std::move(options)), make);
}
DataParallelBase::~DataParallelBase() = default;
DataParallelBase::DataParallelBase(DataParallelBase&&) noexcept = default;
DataParallelBase& DataParallelBase::operator=(DataParallelBase&&) noexcept = default;

const DataParallelOptions& DataParallelBase::options() const noexcept { return state_->options; }
DataParallelBase::Tensors DataParallelBase::run(const Tensors& inputs, const Call& call) const {
  return state_->apply(inputs, call);
}

}  // namespace detail

}  // namespace maniple
