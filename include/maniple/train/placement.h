// A model divided over several devices of one process: each part computes on its own device, and tensors move from part
// to part.
//
//   struct Net : torch::nn::Module {
//     explicit Net(const std::vector<maniple::ComputeDevice>& on)
//         // moves its weights to on[0]
//         : encoder(register_module("encoder", maniple::place(Encoder(784, 512), on[0]))),
//           decoder(register_module("decoder", maniple::place(torch::nn::Linear(512, 10), on[1]))) {}
//     torch::Tensor forward(torch::Tensor x) { return decoder(encoder(x)); }
//     maniple::Placed<Encoder> encoder;
//     maniple::Placed<torch::nn::Linear> decoder;
//   };
//   Net net(maniple::my_devices());                                   // `maniple run --devices-per-process 2`
//   // or a Sequential, cut automatically
//   auto same = maniple::balance(layers, maniple::my_devices(), {.sample = x});
//
// Forward   A placed module moves its tensor arguments to its device and computes there. This includes tensors in
//           tuples, pairs, arrays, vectors, maps and optionals, but not in your own structs. Results stay on that
//           device: the next placed module moves them on, and a loss is computed where the last module is.
// Backward  is autograd's own. Gradients return along the path of the activations, and each gradient is on the device
//           of its parameter.
// Module    A placed module can be registered in a module, put into a Sequential and called like the module itself. The
//           module is its child "module", so parameters are named "encoder.module.fc.weight". train(), zero_grad() and
//           to(dtype) apply to it; to(device) is rejected, because it would undo the placement.
// Ranks     DistributedDataParallel takes such a module like any other. Every rank places its model alike.
//
// Devices. A ComputeDevice is a LibTorch device (the CPU or a GPU) or a *CPU slot*: a thread that computes forward,
// with intra-op threads and, optionally, cores of its own. With slots, a program for several GPUs can run and be tested
// on a machine without GPUs. Backward of a slot runs in the thread that calls backward(), like all CPU work of
// autograd; each GPU has its own autograd thread.
//
// The parts process a batch one after the other: this makes room for a larger model, but is not faster. For speed see
// pipeline.h.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>
#include <maniple/train/module_wrapper.h>
#include <maniple/train/tensor_nest.h>

namespace MANIPLE_API maniple {

namespace detail {
class CpuSlot;  // src/train/placement/compute_device.cpp
}

/// The device of a part of a model. Copies refer to the same device.
class ComputeDevice {
 public:
  /// Throws InvalidArgument for a missing GPU, Unsupported for a device that is neither the CPU nor a CUDA device.
  ComputeDevice(torch::Device device);                                           // NOLINT: converts on purpose
  ComputeDevice(torch::DeviceType type) : ComputeDevice(torch::Device(type)) {}  // NOLINT

  const torch::Device& device() const noexcept { return device_; }  ///< device of the tensors: cpu, cuda:1
  bool is_slot() const noexcept { return slot_ != nullptr; }
  std::string str() const;  ///< "cuda:1", "cpu", "cpu slot 0"
  friend bool operator==(const ComputeDevice& a, const ComputeDevice& b) noexcept {
    return a.device_ == b.device_ && a.slot_ == b.slot_;
  }

  /// Runs `call` on the device: a GPU is LibTorch's current device meanwhile; a slot runs it in its thread, with the
  /// caller's grad mode and autocast. Returns when `call` has returned, and rethrows its exceptions. A slot runs calls
  /// from several threads one at a time.
  void run(const std::function<void()>& call) const;

 private:
  friend class detail::CpuSlot;
  torch::Device device_;
  std::shared_ptr<detail::CpuSlot> slot_;
};

struct CpuSlotOptions {
  std::vector<int> cores = {};  ///< Linux core numbers for its threads; empty: any core that the process may use
  int threads = 0;              ///< intra-op threads; 0: one per core in `cores`, or the caller's number
};

/// Makes a new CPU slot. Its thread lives as long as the slot has owners. Throws InvalidArgument for cores that this
/// process may not use.
ComputeDevice cpu_slot(const CpuSlotOptions& options = {});

/// The devices of this process: the GPUs visible to it (`maniple run --devices-per-process` gives each rank its own).
/// If LibTorch sees no GPU, the number of CPU slots given by --devices-per-process (MANIPLE_DEVICES_PER_PROCESS), which
/// share LibTorch's intra-op threads; without that setting, or with 1, the CPU. Every call returns the same devices.
/// Throws InvalidArgument if the process sees fewer GPUs than it was assigned.
std::vector<ComputeDevice> my_devices();

namespace detail {

/// The part of placed modules that does not depend on their class.
class PlacedBase : public torch::nn::Module {
 public:
  const ComputeDevice& compute_device() const noexcept { return device_; }
  bool is_training() const noexcept override;  ///< of the placed module

  /// Throws InvalidArgument unless the module is already on that device. Changing the dtype is allowed.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

 protected:
  PlacedBase(std::shared_ptr<torch::nn::Module> module, ComputeDevice device);
  std::vector<torch::Tensor> moved(std::vector<torch::Tensor> tensors) const;

 private:
  ComputeDevice device_;
  std::shared_ptr<torch::nn::Module> placed_;
};

template <class Net>
class PlacedCall : public PlacedBase {
 public:
  PlacedCall(std::shared_ptr<Net> module, ComputeDevice device)
      : PlacedBase(module, std::move(device)), module_(std::move(module)) {}
  const std::shared_ptr<Net>& module() const noexcept { return module_; }  ///< the placed module

  /// Runs the module's forward with any arguments that it takes, including its default arguments.
  template <class... Arguments>
  auto call(Arguments&&... arguments) {
    using Given = std::tuple<std::decay_t<Arguments>...>;
    using Output = std::decay_t<decltype(std::declval<Net&>().forward(std::declval<std::decay_t<Arguments>>()...))>;
    const Given given(std::forward<Arguments>(arguments)...);
    Given here = with_tensors(given, moved(tensors_in(given)));
    std::optional<Output> output;
    compute_device().run(
        [&] { std::apply([&](auto&... part) { output.emplace(module_->forward(std::move(part)...)); }, here); });
    return std::move(*output);
  }

 private:
  std::shared_ptr<Net> module_;
};

// Declares forward as the module does, because Sequential reads its type. If the module's forward is a template or
// overloaded, it takes a tensor and returns one.
template <class Net>
auto declared_forward(int) -> decltype(&Net::forward);
template <class Net>
void declared_forward(...);

template <class Net, class Forward>
class PlacedForward : public PlacedCall<Net> {
 public:
  using PlacedCall<Net>::PlacedCall;
  torch::Tensor forward(torch::Tensor input) { return this->call(std::move(input)); }
};
template <class Net, class Result, class... Arguments>
class DeclaredForward : public PlacedCall<Net> {
 public:
  using PlacedCall<Net>::PlacedCall;
  std::decay_t<Result> forward(Arguments... arguments) { return this->call(std::forward<Arguments>(arguments)...); }
};
template <class Net, class Class, class Result, class... Arguments>
class PlacedForward<Net, Result (Class::*)(Arguments...)> : public DeclaredForward<Net, Result, Arguments...> {
 public:
  using DeclaredForward<Net, Result, Arguments...>::DeclaredForward;
};
template <class Net, class Class, class Result, class... Arguments>
class PlacedForward<Net, Result (Class::*)(Arguments...) const> : public DeclaredForward<Net, Result, Arguments...> {
 public:
  using DeclaredForward<Net, Result, Arguments...>::DeclaredForward;
};

}  // namespace detail

/// A module on a device; see above.
template <class Net>
class PlacedImpl : public detail::PlacedForward<Net, decltype(detail::declared_forward<Net>(0))> {
 public:
  using Base = detail::PlacedForward<Net, decltype(detail::declared_forward<Net>(0))>;
  using Base::Base;
};

template <class Net>
class PlacedHolder : public torch::nn::ModuleHolder<PlacedImpl<Net>> {
 public:
  using Impl = PlacedImpl<Net>;
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) const {
    return this->impl_->call(std::forward<Arguments>(arguments)...);
  }
};

/// The holder of a placed module: Placed<torch::nn::Linear>, Placed<Net>.
template <class Net>
using Placed = PlacedHolder<typename detail::ModuleOf<Net>::type>;

/// Moves the module to the device and runs every later forward there. Throws InvalidArgument if the module is null.
template <class Net>
PlacedHolder<Net> place(std::shared_ptr<Net> module, ComputeDevice device) {
  return PlacedHolder<Net>(std::make_shared<PlacedImpl<Net>>(std::move(module), std::move(device)));
}
template <class Net>
PlacedHolder<Net> place(const torch::nn::ModuleHolder<Net>& holder, ComputeDevice device) {
  return place(holder.is_empty() ? nullptr : holder.ptr(), std::move(device));
}

/// The layers of a Sequential in parts, each on its device: the result of balance(). Parameters keep their names in the
/// Sequential ("3.weight"), so weights and checkpoints are interchangeable.
class PlacedSequentialImpl : public torch::nn::Module {
 public:
  /// Part i begins with layer begins[i] and is on devices[i]. Throws InvalidArgument unless begins starts with 0 and
  /// rises, and if a parameter shared by two layers (tied) would have to be on two devices.
  PlacedSequentialImpl(const torch::nn::Sequential& layers, std::vector<ComputeDevice> devices,
                       std::vector<std::size_t> begins);

  /// The first layer takes a tensor, and the last one returns a tensor. Between layers on one device any type is
  /// allowed; between devices, tensors, and vectors, pairs and tuples of up to three tensors.
  torch::Tensor forward(torch::Tensor input);

  const std::vector<ComputeDevice>& devices() const noexcept { return devices_; }
  const std::vector<std::size_t>& begins() const noexcept { return begins_; }
  /// One line per part: its device, its layers, their bytes.
  std::string text() const;

  /// As for a placed module: throws InvalidArgument if a device is given.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

 private:
  std::vector<torch::nn::AnyModule> layers_;
  std::vector<ComputeDevice> devices_;
  std::vector<std::size_t> begins_;
};
TORCH_MODULE(PlacedSequential);

struct BalanceOptions {
  /// An input of the first layer. If given, the parts take about equal time: forward and backward of each layer are
  /// measured with it on the first device (on the CPU in processor time, so that other programs do not disturb the
  /// measurement). If not given, the parts have about equal bytes of parameters and buffers.
  torch::Tensor sample = {};
  int repeats = 5;  ///< runs per layer; the shortest time counts
  /// Times differ between ranks, so all ranks of this group use rank 0's cut. Collective if `sample` is given (on all
  /// ranks or none). Null: the default group; without one, this process alone.
  std::shared_ptr<ProcessGroup> group = nullptr;
};

/// Cuts the layers into one part per device, in order, such that the largest part is as small as possible. Measuring
/// does not change buffers, gradients or random numbers. Throws InvalidArgument if there are fewer layers than devices.
PlacedSequential balance(const torch::nn::Sequential& layers, const std::vector<ComputeDevice>& devices,
                         const BalanceOptions& options = {});

/// The cuts that balance() would choose: the first layer of each part.
std::vector<std::size_t> balanced_cut(const torch::nn::Sequential& layers, std::size_t parts,
                                      const ComputeDevice& measured_on, const BalanceOptions& options = {});

/// The same for costs of any kind, one per layer. Of all ways to cut them into `parts` non-empty runs, chooses the one
/// with the smallest maximum sum; among equals, the one with the earliest cuts.
std::vector<std::size_t> balanced_cut(const std::vector<double>& costs, std::size_t parts);

}  // namespace maniple
