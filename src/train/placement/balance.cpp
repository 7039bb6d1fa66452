#include <time.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <sstream>
#include <unordered_set>

#include "comm/base/check.h"
#include "train/restored.h"
#include "train/tensor/device.h"
#include "train/tensor/failed_on.h"
#include "train/tensor/public_call.h"
#include <maniple/dist.h>
#include <maniple/train/placement.h>

namespace maniple {
namespace {

using torch::Tensor;
using torch::nn::AnyValue;

std::string name_of(const torch::nn::Sequential& layers, std::size_t index) {
  return format_text("{} ({})", layers->named_children()[index].key(), layers->ptr(index)->name());
}

/// Parameters and buffers.
std::vector<Tensor> tensors_of(const torch::nn::Module& module) {
  std::vector<Tensor> all = module.parameters();
  for (const Tensor& buffer : module.buffers()) all.push_back(buffer);
  std::erase_if(all, [](const Tensor& one) { return !one.defined(); });
  return all;
}

std::uint64_t bytes_of_layer(const torch::nn::Module& layer, std::unordered_set<const void*>& counted) {
  std::uint64_t bytes = 0;
  for (const Tensor& tensor : tensors_of(layer)) {
    if (counted.insert(tensor.unsafeGetTensorImpl()).second) bytes += tensor.nbytes();
  }
  return bytes;
}

// ---- Values passed from layer to layer ------------------------------------------------------------------------------

/// Applies `change` to the tensors of the value if the value is a T; returns whether it is.
template <class T, class Change>
bool change_as(AnyValue& value, const Change& change) {
  const T* const found = value.try_get<T>();
  if (found == nullptr) return false;
  std::vector<Tensor> tensors = detail::tensors_in(*found);
  for (Tensor& tensor : tensors) {
    if (tensor.defined()) tensor = change(tensor);
  }
  value = AnyValue(detail::with_tensors(*found, tensors));
  return true;
}

/// False if the value's type is not supported.
template <class Change>
bool change_tensors(AnyValue& value, const Change& change) {
  return change_as<Tensor>(value, change) || change_as<std::vector<Tensor>>(value, change) ||
         change_as<std::tuple<Tensor, Tensor>>(value, change) || change_as<std::pair<Tensor, Tensor>>(value, change) ||
         change_as<std::tuple<Tensor, Tensor, Tensor>>(value, change);
}

// ---- Measuring ------------------------------------------------------------------------------------------------------

/// Runs forward and backward of a layer; returns the result.
AnyValue run_once(torch::nn::AnyModule& layer, const AnyValue& input) {
  const torch::AutoGradMode with_graph(true);
  AnyValue own = input;
  std::vector<Tensor> sources = layer.ptr()->parameters(), results;
  std::erase_if(sources, [](const Tensor& one) { return !one.defined() || !one.requires_grad(); });
  change_tensors(own, [&](const Tensor& given) {
    Tensor cut = given.detach();
    if (cut.is_floating_point()) sources.push_back(cut.set_requires_grad(true));
    return cut;
  });
  // A copy where possible: an in-place layer (ReLU) must not change a leaf.
  AnyValue argument = own;
  change_tensors(argument, [](const Tensor& leaf) { return leaf.requires_grad() ? leaf.clone() : leaf; });
  AnyValue output = layer.any_forward(std::move(argument));
  change_tensors(output, [&](const Tensor& result) {
    if (result.requires_grad()) results.push_back(result);
    return result.detach();
  });
  if (!results.empty()) {
    std::vector<Tensor> ones;
    for (const Tensor& result : results) ones.push_back(torch::ones_like(result));
    torch::autograd::grad(results, sources, ones, /*retain_graph=*/false, /*create_graph=*/false,
                          /*allow_unused=*/true);
  }
  return output;
}

/// Milliseconds for each layer.
std::vector<double> measure(const torch::nn::Sequential& layers, const ComputeDevice& on,
                            const BalanceOptions& options) {
  MANIPLE_REQUIRE(options.repeats >= 1, "balance: {} repeats; expected at least 1", options.repeats);
  std::vector<at::Generator> generators = device_generators();
  generators.push_back(at::globalContext().defaultGenerator(torch::kCPU));
  const Restored random{RandomStates(std::move(generators))};
  const Restored buffers{TensorValues(layers->buffers())};
  // A clock in milliseconds. On the CPU it measures the processor time of this thread, which shares the work of the
  // intra-op threads, so that other programs do not count.
  const auto clock = [&] {
    timespec now{};
    if (on.device().is_cuda()) torch::cuda::synchronize(on.device().index());
    ::clock_gettime(on.device().is_cuda() ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
  };
  std::vector<double> costs;
  AnyValue value(options.sample.detach().to(on.device()));
  for (auto layer = layers.ptr()->begin(); layer != layers.ptr()->end(); ++layer) {
    const std::vector<Tensor> own = tensors_of(*layer->ptr());
    const torch::Device before = own.empty() ? on.device() : own.front().device();
    layer->ptr()->to(on.device());
    double least = std::numeric_limits<double>::infinity();
    AnyValue output = value;
    on.run([&] {
      output = run_once(*layer, value);  // the first run is slower: memory, kernels
      for (int i = 0; i < options.repeats; ++i) {
        const double begin = clock();
        run_once(*layer, value);
        least = std::min(least, clock() - begin);
      }
    });
    layer->ptr()->to(before);
    costs.push_back(least);
    value = std::move(output);
  }
  return costs;
}

std::vector<double> bytes_of_layers(const torch::nn::Sequential& layers) {
  std::unordered_set<const void*> counted;
  std::vector<double> costs;
  for (std::size_t i = 0; i < layers->size(); ++i) {
    costs.push_back(static_cast<double>(bytes_of_layer(*layers->ptr(i), counted)));
  }
  return costs;
}

/// Rank 0's cut, on all ranks; an exception of `make` on rank 0 is thrown on all ranks.
std::vector<std::size_t> cut_of_rank_0(ProcessGroup& group, const std::function<std::vector<std::size_t>()>& make) {
  std::string text;
  std::exception_ptr thrown;
  if (group.rank() == 0) {
    try {
      text = "cut " + joined(make(), " ");
    } catch (const std::exception& error) {
      thrown = std::current_exception();
      text = std::string("failed ") + error.what();
    }
  }
  std::istringstream words(group.broadcast_object(text, 0, {}, public_place()));
  if (thrown) std::rethrow_exception(thrown);
  std::string kind, rest;
  words >> kind;
  if (kind != "cut") {
    std::getline(words, rest);
    throw_failed_on<Aborted>(group, 0, "balance: measuring the layers failed on rank 0:" + rest);
  }
  std::vector<std::size_t> begins;
  for (std::size_t begin = 0; words >> begin;) begins.push_back(begin);
  return begins;
}

void require_fits(const torch::nn::Sequential& layers, const std::vector<std::size_t>& begins) {
  bool fits = !begins.empty() && begins.front() == 0 && begins.back() < layers->size();
  for (std::size_t i = 1; i < begins.size(); ++i) fits = fits && begins[i] > begins[i - 1];
  MANIPLE_REQUIRE(fits,
                  "PlacedSequential: parts that begin with layers {} of {}; expected 0 first, then rising numbers",
                  joined(begins), layers->size());
}

}  // namespace

std::vector<std::size_t> balanced_cut(const std::vector<double>& costs, std::size_t parts) {
  const std::size_t n = costs.size();
  MANIPLE_REQUIRE(parts >= 1 && parts <= n, "balance: {} layers cannot be cut into {} parts of at least one", n, parts);
  for (const double cost : costs) {
    MANIPLE_REQUIRE(std::isfinite(cost) && cost >= 0, "balance: a layer of cost {}; expected 0 or more", cost);
  }
  std::vector<double> sums(n + 1, 0.0);
  for (std::size_t i = 0; i < n; ++i) sums[i + 1] = sums[i] + costs[i];
  // least[k][i] is the largest part if layers i .. n-1 are cut optimally into k parts; end[k][i] is the end of the
  // first of these parts.
  const double never = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> least(parts + 1, std::vector<double>(n + 1, never));
  std::vector<std::vector<std::size_t>> end(parts + 1, std::vector<std::size_t>(n + 1, n));
  for (std::size_t i = 0; i < n; ++i) least[1][i] = sums[n] - sums[i];
  for (std::size_t k = 2; k <= parts; ++k) {
    for (std::size_t i = 0; i + k <= n; ++i) {
      for (std::size_t j = i + 1; j + (k - 1) <= n; ++j) {
        const double largest = std::max(sums[j] - sums[i], least[k - 1][j]);
        if (largest >= least[k][i]) continue;
        least[k][i] = largest;
        end[k][i] = j;
      }
    }
  }
  std::vector<std::size_t> begins = {0};
  for (std::size_t k = parts; k > 1; --k) begins.push_back(end[k][begins.back()]);
  return begins;
}

std::vector<std::size_t> balanced_cut(const torch::nn::Sequential& layers, std::size_t parts,
                                      const ComputeDevice& measured_on, const BalanceOptions& options) {
  MANIPLE_REQUIRE(!layers.is_empty() && layers->size() >= parts && parts >= 1,
                  "balance: {} layers cannot be cut into {} parts of at least one",
                  layers.is_empty() ? 0 : layers->size(), parts);
  if (!options.sample.defined()) return balanced_cut(bytes_of_layers(layers), parts);
  const auto cut = [&] { return balanced_cut(measure(layers, measured_on, options), parts); };
  const auto group = options.group ? options.group : is_initialized() ? get_default_group() : nullptr;
  if (!group || group->size() == 1) return cut();
  group->require_member("balance");
  const PublicCall call("balance, which all ranks call");
  std::vector<std::size_t> begins = cut_of_rank_0(*group, cut);
  MANIPLE_REQUIRE(
      begins.size() == parts && begins.back() < layers->size(),
      "balance: rank 0 cuts its layers at {}, which does not fit the {} layers and {} parts of rank {}; all "
      "ranks must give the same ones",
      joined(begins), layers->size(), parts, group->rank());
  return begins;
}

PlacedSequential balance(const torch::nn::Sequential& layers, const std::vector<ComputeDevice>& devices,
                         const BalanceOptions& options) {
  MANIPLE_REQUIRE(!devices.empty(), "balance: no devices; my_devices() returns this process's devices");
  return PlacedSequential(layers, devices, balanced_cut(layers, devices.size(), devices.front(), options));
}

// ---- PlacedSequential -----------------------------------------------------------------------------------------------

PlacedSequentialImpl::PlacedSequentialImpl(const torch::nn::Sequential& layers, std::vector<ComputeDevice> devices,
                                           std::vector<std::size_t> begins)
    : torch::nn::Module("PlacedSequential"), devices_(std::move(devices)), begins_(std::move(begins)) {
  MANIPLE_REQUIRE(!layers.is_empty() && !layers->is_empty(), "PlacedSequential: no layers");
  MANIPLE_REQUIRE(devices_.size() == begins_.size(), "PlacedSequential: {} devices for {} parts", devices_.size(),
                  begins_.size());
  require_fits(layers, begins_);
  std::map<const void*, std::pair<std::size_t, std::size_t>> first;  // for each tensor: its first part and layer
  for (std::size_t part = 0; part < begins_.size(); ++part) {
    const std::size_t end = part + 1 < begins_.size() ? begins_[part + 1] : layers->size();
    for (std::size_t i = begins_[part]; i < end; ++i) {
      for (const Tensor& tensor : tensors_of(*layers->ptr(i))) {
        const auto [seen, is_new] = first.emplace(tensor.unsafeGetTensorImpl(), std::pair(part, i));
        MANIPLE_REQUIRE(devices_[seen->second.first].device() == devices_[part].device(),
                        "PlacedSequential: layers {} and {} share a parameter, but would be on {} and {}; cut so that "
                        "they are on one device",
                        name_of(layers, seen->second.second), name_of(layers, i), devices_[seen->second.first].str(),
                        devices_[part].str());
      }
    }
  }
  for (std::size_t part = 0, i = 0; i < layers->size(); ++i) {
    if (part + 1 < begins_.size() && begins_[part + 1] == i) ++part;
    layers->ptr(i)->to(devices_[part].device());
    register_module(layers->named_children()[i].key(), layers->ptr(i));
  }
  layers_.assign(layers->begin(), layers->end());
}

Tensor PlacedSequentialImpl::forward(Tensor input) {
  AnyValue value(std::move(input));
  torch::Device at = torch::kMeta;  // meta: the device of no part
  for (std::size_t part = 0; part < begins_.size(); ++part) {
    const std::size_t begin = begins_[part], end = part + 1 < begins_.size() ? begins_[part + 1] : layers_.size();
    const torch::Device device = devices_[part].device();
    if (at != device) {
      const bool known = change_tensors(value, [&](const Tensor& one) { return one.to(device, true); });
      MANIPLE_REQUIRE(
          known,
          "PlacedSequential: layer {} returns something else than tensors, and pairs, tuples and vectors of "
          "them, which cannot be moved to {}; cut elsewhere",
          begin - 1, devices_[part].str());
      at = device;
    }
    devices_[part].run([&] {
      for (std::size_t i = begin; i < end; ++i) value = layers_[i].any_forward(std::move(value));
    });
  }
  const Tensor* const result = value.try_get<Tensor>();
  MANIPLE_REQUIRE(result != nullptr, "PlacedSequential: its last layer must return a tensor");
  return *result;
}

std::string PlacedSequentialImpl::text() const {
  std::string lines;
  std::unordered_set<const void*> counted;
  for (std::size_t part = 0; part < begins_.size(); ++part) {
    const std::size_t begin = begins_[part], end = part + 1 < begins_.size() ? begins_[part + 1] : layers_.size();
    std::uint64_t bytes = 0;
    for (std::size_t i = begin; i < end; ++i) bytes += bytes_of_layer(*layers_[i].ptr(), counted);
    lines += format_text("{}: layers {} to {}, {} bytes\n", devices_[part].str(), begin, end - 1, bytes);
  }
  return lines;
}

void PlacedSequentialImpl::to(torch::Device device, bool) {
  for (const ComputeDevice& own : devices_) {
    MANIPLE_REQUIRE(own.device() == device || (own.device().is_cpu() && device.is_cpu()),
                    "PlacedSequential: to({}) would move layers that were placed on {}; balance them anew",
                    device.str(), own.str());
  }
}
void PlacedSequentialImpl::to(torch::Dtype dtype, bool non_blocking) { torch::nn::Module::to(dtype, non_blocking); }
void PlacedSequentialImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  to(device, non_blocking);
  to(dtype, non_blocking);
}

}  // namespace maniple
