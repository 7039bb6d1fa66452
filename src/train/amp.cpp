// Mixed precision: autocast for a region, and loss scaling.
//
// On the CPU our own loop unscales and checks gradients, reading them once (before 2.3 LibTorch lacks this loop for
// the CPU). Other devices use LibTorch's kernels for lists of tensors.
#include <maniple/train/amp.h>

#include <ATen/Parallel.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <sstream>
#include <utility>
#include <vector>

#include "comm/base/check.h"
#include "train/checkpoint/named_state.h"
#include "train/tensor/public_call.h"
#include "train/tensor/torch_compat.h"
#include "train/tensor_layout.h"
#include <maniple/dist.h>

namespace maniple {

// ---- Autocast -------------------------------------------------------------------------------------------------------

Autocast::Autocast(torch::DeviceType device, const AutocastOptions& options)
    : device_(device), enabled_before_(false), cache_before_(at::autocast::is_autocast_cache_enabled()) {
  const bool on_cpu = device == torch::kCPU;
  MANIPLE_REQUIRE(on_cpu || device == torch::kCUDA, "Autocast: for {}; expected the CPU or CUDA",
                  c10::DeviceTypeName(device));
  const torch::ScalarType dtype = options.dtype.value_or(on_cpu ? torch::kBFloat16 : torch::kFloat16);
  const bool half = dtype == torch::kFloat16 && (!on_cpu || MANIPLE_TORCH_AT_LEAST(2, 3));
  MANIPLE_REQUIRE(dtype == torch::kBFloat16 || half, "Autocast: to {} on {}; expected BFloat16{}", c10::toString(dtype),
                  c10::DeviceTypeName(device), on_cpu ? ", or Half with LibTorch 2.3 or later" : " or Half");
  enabled_before_ = autocast_enabled(device);
  dtype_before_ = autocast_dtype(device);
  enable_autocast(device, options.enabled);
  set_autocast_dtype(device, dtype);
  at::autocast::increment_nesting();
  at::autocast::set_autocast_cache_enabled(options.cache_enabled);
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  enable_autocast(device_, enabled_before_);
  set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_cache_enabled(cache_before_);
}

// ---- Gradients ------------------------------------------------------------------------------------------------------

namespace {

constexpr std::int64_t kUnscaleGrain = 32 * 1024;  // elements per thread that make a thread worthwhile

/// Multiplies in place. Returns whether all numbers were finite.
template <class Number>
bool unscale_memory(Number* data, std::int64_t count, float inverse) {
  using Wide = std::conditional_t<std::is_same_v<Number, double>, double, float>;
  std::atomic<bool> finite = true;
  at::parallel_for(0, count, kUnscaleGrain, [&](std::int64_t begin, std::int64_t end) {
    int bad = 0;  // an integer without branches, so that the compiler vectorises the loop
    for (std::int64_t i = begin; i < end; ++i) {
      const Wide value = static_cast<Wide>(data[i]);
      bad |= !(std::abs(value) <= std::numeric_limits<Wide>::max());
      data[i] = static_cast<Number>(value * static_cast<Wide>(inverse));
    }
    if (bad != 0) finite.store(false, std::memory_order_relaxed);
  });
  return finite;
}

bool unscale_on_cpu(torch::Tensor& gradient, float inverse) {
  const std::int64_t count = gradient.numel();
  if (is_dense(gradient) && gradient.scalar_type() == torch::kFloat32)
    return unscale_memory(gradient.data_ptr<float>(), count, inverse);
  if (is_dense(gradient) && gradient.scalar_type() == torch::kFloat64)
    return unscale_memory(gradient.data_ptr<double>(), count, inverse);
  if (is_dense(gradient) && gradient.scalar_type() == torch::kBFloat16)
    return unscale_memory(gradient.data_ptr<at::BFloat16>(), count, inverse);
  const bool finite = torch::isfinite(gradient).all().item<bool>();
  gradient.mul_(inverse);
  return finite;
}

/// Whether a float32 above 0 can hold the value.
bool is_scale(double value) { return value > 0 && value <= static_cast<double>(std::numeric_limits<float>::max()); }

void require_gradient(const torch::Tensor& gradient, std::size_t index) {
  MANIPLE_REQUIRE(gradient.layout() == torch::kStrided,
                  "GradScaler: the gradient of parameter {} of the optimizer is sparse; use sparse(false)", index);
  MANIPLE_REQUIRE(
      gradient.scalar_type() != torch::kFloat16,
      "GradScaler: the gradient of parameter {} of the optimizer is in float16: dividing it by the scale would "
      "make zeros of what the scale has saved; keep parameters in float32 and compute under Autocast",
      index);
}

}  // namespace

// ---- GradScaler -----------------------------------------------------------------------------------------------------

struct GradScaler::Impl {
  enum class Stage { unscaled, stepped };
  struct OfOptimizer {
    Stage stage = Stage::unscaled;
    torch::Tensor found;  ///< one float32 on the device of `scale`: above zero if a gradient is not finite
  };

  GradScalerOptions options;
  double start = 0;  ///< scale and growth tracker until the tensors exist
  int start_tracker = 0;
  torch::Tensor scale;    ///< one float32, on the device of the first loss; undefined before that
  torch::Tensor tracker;  ///< one int32
  std::map<const torch::optim::Optimizer*, OfOptimizer> optimizers;  ///< optimizers seen since the last update

  void place(const torch::Device& device) {
    if (scale.defined()) return;
    const auto on_device = torch::TensorOptions().device(device);
    scale = torch::full({}, start, on_device.dtype(torch::kFloat32));
    tracker = torch::full({}, start_tracker, on_device.dtype(torch::kInt32));
  }

  double scale_now() const { return scale.defined() ? scale.item<double>() : start; }
  int tracker_now() const { return tracker.defined() ? tracker.item<int>() : start_tracker; }

  torch::Tensor unscale(torch::optim::Optimizer& optimizer) {
    const torch::NoGradGuard no_grad;
    std::map<std::pair<std::string, torch::ScalarType>, std::vector<torch::Tensor>> lists;  // outside the CPU
    std::vector<torch::Tensor> on_cpu;
    std::vector<torch::Tensor> parameters;
    for (const auto& group : optimizer.param_groups())
      parameters.insert(parameters.end(), group.params().begin(), group.params().end());
    parameters = detail::distinct(parameters);
    const auto groups = detail::dividing_groups(parameters, options.group);
    for (std::size_t index = 0; index < parameters.size(); ++index) {
      const torch::Tensor& gradient = parameters[index].grad();
      if (!gradient.defined()) continue;
      require_gradient(gradient, index);
      place(gradient.device());
      if (gradient.is_cpu()) {
        on_cpu.push_back(gradient);
      } else {
        lists[{gradient.device().str(), gradient.scalar_type()}].push_back(gradient);
      }
    }
    place(torch::kCPU);  // without any gradient
    torch::Tensor found = torch::zeros({}, scale.options());
    if (!on_cpu.empty()) {
      // Like PyTorch: the reciprocal of a float64.
      const auto inverse = static_cast<float>(1.0 / scale_now());
      bool finite = true;
      for (torch::Tensor& gradient : on_cpu) finite = unscale_on_cpu(gradient, inverse) && finite;
      if (!finite) found.fill_(1);
    }
    const torch::Tensor inverse =
        lists.empty() ? torch::Tensor() : scale.to(torch::kFloat64).reciprocal().to(torch::kFloat32);
    for (const auto& [key, gradients] : lists) {
      const torch::Device device = gradients.front().device();
      torch::Tensor here = torch::zeros({}, torch::TensorOptions().device(device).dtype(torch::kFloat32));
      const torch::Tensor factor = inverse.to(device, torch::kFloat32, true);
      if (key.second == torch::kBFloat16) {  // LibTorch lacks such a kernel for bfloat16 on a GPU
        for (torch::Tensor gradient : gradients) {
          here += gradient.isfinite().all().logical_not();
          gradient.copy_(gradient.to(torch::kFloat32).mul_(factor));
        }
        here.clamp_max_(1);
      } else {
        at::_amp_foreach_non_finite_check_and_unscale_(gradients, here, factor);
      }
      found += here.to(found.device(), torch::kFloat32, true);
    }
    for (const auto& group : groups) all_reduce(found, ReduceOp::max, {.group = group}, public_place());
    return found;
  }

  void adapt(const torch::Tensor& found) {
    if (!scale.is_cpu()) {
      at::_amp_update_scale_(scale, tracker, found, options.growth_factor, options.backoff_factor,
                             options.growth_interval);
      return;
    }
    const double now = scale_now();
    if (found.item<float>() > 0) {
      scale.fill_(now * options.backoff_factor);
      tracker.fill_(0);
    } else if (tracker_now() + 1 == options.growth_interval) {
      const double grown = now * options.growth_factor;
      if (is_scale(grown)) scale.fill_(grown);
      tracker.fill_(0);
    } else {
      tracker.add_(1);
    }
  }
};

GradScaler::GradScaler(const GradScalerOptions& options) : impl_(std::make_unique<Impl>()) {
  MANIPLE_REQUIRE(is_scale(options.init_scale), "GradScaler: init_scale is {}; expected a finite number above 0",
                  options.init_scale);
  MANIPLE_REQUIRE(options.growth_factor > 1, "GradScaler: growth_factor is {}; expected more than 1",
                  options.growth_factor);
  MANIPLE_REQUIRE(options.backoff_factor > 0 && options.backoff_factor < 1,
                  "GradScaler: backoff_factor is {}; expected a number between 0 and 1", options.backoff_factor);
  MANIPLE_REQUIRE(options.growth_interval >= 1, "GradScaler: growth_interval is {}; expected at least 1",
                  options.growth_interval);
  if (options.group) options.group->require_member("GradScaler");
  impl_->options = options;
  impl_->start = options.init_scale;
}
GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

torch::Tensor GradScaler::scale(const torch::Tensor& loss) {
  if (!impl_->options.enabled) return loss;
  MANIPLE_REQUIRE(loss.defined(), "GradScaler: the loss is undefined");
  impl_->place(loss.device());
  const bool is_short = loss.scalar_type() == torch::kFloat16 || loss.scalar_type() == torch::kBFloat16;
  return (is_short ? loss.to(torch::kFloat32) : loss) * impl_->scale.to(loss.device(), torch::kFloat32, true);
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!impl_->options.enabled) return;
  MANIPLE_REQUIRE(impl_->optimizers.count(&optimizer) == 0,
                  "GradScaler: unscale_ after {} of the same optimizer, with no update() in between",
                  impl_->optimizers[&optimizer].stage == Impl::Stage::stepped ? "step" : "unscale_");
  const PublicCall call("GradScaler::unscale_, which all ranks call");
  torch::Tensor found = impl_->unscale(optimizer);
  impl_->optimizers[&optimizer] = {Impl::Stage::unscaled, std::move(found)};
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!impl_->options.enabled) {
    optimizer.step();
    return true;
  }
  const PublicCall call("GradScaler::step, which all ranks call");
  if (impl_->optimizers.count(&optimizer) == 0) unscale_(optimizer);
  Impl::OfOptimizer& own = impl_->optimizers[&optimizer];
  MANIPLE_REQUIRE(own.stage == Impl::Stage::unscaled,
                  "GradScaler: step of the same optimizer twice, with no update() in between");
  own.stage = Impl::Stage::stepped;
  const bool finite = own.found.item<float>() == 0;
  if (finite) optimizer.step();
  return finite;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!impl_->options.enabled) return;
  const torch::NoGradGuard no_grad;
  if (new_scale) {
    MANIPLE_REQUIRE(is_scale(*new_scale), "GradScaler: a scale of {}; expected a finite number above 0", *new_scale);
    impl_->start = *new_scale;
    if (impl_->scale.defined()) impl_->scale.fill_(*new_scale);
  } else {
    MANIPLE_REQUIRE(!impl_->optimizers.empty(),
                    "GradScaler: update() without a step() or unscale_() since the last one");
    torch::Tensor found;
    for (const auto& [optimizer, own] : impl_->optimizers) found = found.defined() ? found + own.found : own.found;
    impl_->adapt(found);
  }
  impl_->optimizers.clear();
}

double GradScaler::get_scale() const { return impl_->options.enabled ? impl_->scale_now() : 1; }
int GradScaler::get_growth_tracker() const { return impl_->tracker_now(); }
bool GradScaler::is_enabled() const noexcept { return impl_->options.enabled; }

std::string GradScaler::state_dict() const {
  return format_text("{} {} {} {} {}", text_of(impl_->scale_now()), text_of(impl_->options.growth_factor),
                     text_of(impl_->options.backoff_factor), impl_->options.growth_interval, impl_->tracker_now());
}

void GradScaler::load_state_dict(const std::string& text) {
  std::istringstream words(text);
  std::vector<std::string> all;
  for (std::string word; words >> word;) all.push_back(word);
  if (all.size() != 5) throw ProtocolError(format_text("\"{}\" is not the state of a GradScaler", text));
  const double scale = real_of(all[0]), growth = real_of(all[1]), backoff = real_of(all[2]);
  const auto interval = integer_of(all[3]), tracker = integer_of(all[4]);
  const bool sound = is_scale(scale) && growth > 1 && backoff > 0 && backoff < 1 && interval >= 1 &&
                     interval <= std::numeric_limits<int>::max() && tracker >= 0 && tracker < interval;
  if (!sound) throw ProtocolError(format_text("\"{}\" is not the state of a GradScaler: numbers out of range", text));
  impl_->options.growth_factor = growth;
  impl_->options.backoff_factor = backoff;
  impl_->options.growth_interval = static_cast<int>(interval);
  impl_->start = scale;
  impl_->start_tracker = static_cast<int>(tracker);
  impl_->scale = impl_->tracker = torch::Tensor();
  impl_->optimizers.clear();
}

}  // namespace maniple
