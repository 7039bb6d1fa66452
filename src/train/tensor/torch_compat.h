// The differences between LibTorch 1.13 and later versions, all in one place. The other code uses the newer spelling.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

// LibTorch defines TORCH_VERSION_MAJOR since 1.8.
#define MANIPLE_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace maniple {

/// Whether the elements fill their memory without gaps or overlap: such a tensor can be moved as a block, whatever its
/// strides.
inline bool is_dense(const torch::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense();
}

/// Notifies autograd that the tensor's memory was written elsewhere, as an in-place operation would.
inline void bump_version(const torch::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) torch::autograd::impl::bump_version(tensor);
}

/// Sets gradients to zero, or to none. Before 2.0, Optimizer::zero_grad took no argument and set them to zero. Since
/// then it takes `set_to_none`, true by default.
inline void zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none) {
#if MANIPLE_TORCH_AT_LEAST(2, 0)
  optimizer.zero_grad(set_to_none);
#else
  if (!set_to_none) return optimizer.zero_grad();
  for (auto& group : optimizer.param_groups()) {
    for (auto& parameter : group.params()) parameter.mutable_grad() = torch::Tensor();
  }
#endif
}

// Nodes of autograd's graph. LibTorch holds them by std::shared_ptr, recent versions (such as 2.14) by
// c10::intrusive_ptr.

using AnyNode = decltype(torch::autograd::Edge::function);
inline constexpr bool kNodesAreIntrusive = !std::is_same_v<AnyNode, std::shared_ptr<torch::autograd::Node>>;

template <class Kind>
using NodePointer = std::conditional_t<kNodesAreIntrusive, c10::intrusive_ptr<Kind>, std::shared_ptr<Kind>>;
template <class Kind>
using WeakNodePointer = std::conditional_t<kNodesAreIntrusive, c10::weak_intrusive_ptr<Kind>, std::weak_ptr<Kind>>;

template <class Kind, class... Arguments>
NodePointer<Kind> make_node(Arguments&&... arguments) {
  if constexpr (kNodesAreIntrusive) {
    return c10::make_intrusive<Kind>(std::forward<Arguments>(arguments)...);
  } else {
    // Nodes may form long chains; torch::autograd's deleteNode destroys them without recursion.
    return NodePointer<Kind>(new Kind(std::forward<Arguments>(arguments)...), [](auto* node) { deleteNode(node); });
  }
}

/// Another pointer to a node that already has an owner.
template <class Kind>
NodePointer<Kind> pointer_to(Kind* node) {
  if constexpr (kNodesAreIntrusive) {
    return NodePointer<Kind>::unsafe_reclaim_from_nonowning(node);
  } else {
    return std::static_pointer_cast<Kind>(node->shared_from_this());
  }
}

/// Called at the end of a node's `void release_resources()`: calls its base's version, if there is one. Only intrusive
/// pointers call release_resources(), when the last strong pointer goes; the destructor runs only after the last weak
/// pointer.
template <class Base>
void release_base(Base& node) {
  if constexpr (requires { node.Base::release_resources(); }) node.Base::release_resources();
}

/// Until it is destroyed, calls `before` each time autograd is about to store a gradient in `parameter.grad()`, and
/// `after` when it has. A parameter that is converted to another dtype or device gets a new gradient accumulator, which
/// lacks the hook that calls `after`. The hook that calls `before` belongs to the tensor and stays.
class GradientHook {
 public:
  GradientHook(const torch::Tensor& parameter, std::function<void()> before, std::function<void()> after)
      : parameter_(parameter),
        before_(parameter.register_hook([call = std::move(before)](const torch::Tensor&) { call(); })),
        accumulator_(torch::autograd::impl::grad_accumulator(parameter)),
        after_(accumulator_->add_post_hook(std::make_unique<Hook>(std::move(after)))) {}
  ~GradientHook() {
    if (!accumulator_) return;
    accumulator_->del_post_hook(after_);
    parameter_.remove_hook(before_);
  }
  GradientHook(GradientHook&& other) noexcept = default;
  GradientHook& operator=(GradientHook&&) = delete;

  /// Whether `after` is still called on new gradients.
  bool is_attached() const { return torch::autograd::impl::grad_accumulator(parameter_) == accumulator_; }

 private:
  struct Hook final : torch::autograd::FunctionPostHook {
    explicit Hook(std::function<void()> f) : called(std::move(f)) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                              const torch::autograd::variable_list&) override {
      called();
      return outputs;
    }
    std::function<void()> called;
  };
  torch::Tensor parameter_;
  unsigned before_;
  AnyNode accumulator_;  // autograd itself holds it only weakly
  std::uintptr_t after_;
};

/// The dtype that autocast casts to on the CPU or on CUDA. It is thread-local, and at::ThreadLocalState does not carry
/// it (though it carries whether autocast is on). Since 2.4 one function serves all devices.
inline torch::ScalarType autocast_dtype(torch::DeviceType device) {
#if MANIPLE_TORCH_AT_LEAST(2, 4)
  return at::autocast::get_autocast_dtype(device);
#else
  return device == torch::kCPU ? at::autocast::get_autocast_cpu_dtype() : at::autocast::get_autocast_gpu_dtype();
#endif
}
inline void set_autocast_dtype(torch::DeviceType device, torch::ScalarType dtype) {
#if MANIPLE_TORCH_AT_LEAST(2, 4)
  at::autocast::set_autocast_dtype(device, dtype);
#else
  device == torch::kCPU ? at::autocast::set_autocast_cpu_dtype(dtype) : at::autocast::set_autocast_gpu_dtype(dtype);
#endif
}

inline bool autocast_enabled(torch::DeviceType device) {
#if MANIPLE_TORCH_AT_LEAST(2, 4)
  return at::autocast::is_autocast_enabled(device);
#else
  return device == torch::kCPU ? at::autocast::is_cpu_enabled() : at::autocast::is_enabled();
#endif
}
inline void enable_autocast(torch::DeviceType device, bool enabled) {
#if MANIPLE_TORCH_AT_LEAST(2, 4)
  at::autocast::set_autocast_enabled(device, enabled);
#else
  device == torch::kCPU ? at::autocast::set_cpu_enabled(enabled) : at::autocast::set_enabled(enabled);
#endif
}

/// Inside a hook: runs `callback` at the end of the current backward, in its thread. backward() throws what the
/// callback throws.
inline void at_end_of_backward(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

/// Inside a hook or a node: runs `callback` if the current backward throws. In that case autograd drops its
/// end-of-backward callbacks.
class IfBackwardThrows {
 public:
  static void call(std::function<void()> callback) {
    at_end_of_backward(
        [guard = std::make_shared<IfBackwardThrows>(std::move(callback))] { guard->callback_ = nullptr; });
  }
  explicit IfBackwardThrows(std::function<void()> callback) : callback_(std::move(callback)) {}
  ~IfBackwardThrows() {
    if (callback_) callback_();
  }

 private:
  std::function<void()> callback_;  // must not throw
};

}  // namespace maniple
