// A model over several devices of one process: each part computes on a device of its own, and tensors go from part to
// part.
//
//   struct Net : torch::nn::Module {
//     explicit Net(const std::vector<maniple::ComputeDevice>& on)
//         // its weights go to on[0]
//         : encoder(register_module("encoder", maniple::place(Encoder(784, 512), on[0]))),
//           decoder(register_module("decoder", maniple::place(torch::nn::Linear(512, 10), on[1]))) {}
//     torch::Tensor forward(torch::Tensor x) { return decoder(encoder(x)); }
//     maniple::Placed<Encoder> encoder;
//     maniple::Placed<torch::nn::Linear> decoder;
//   };
//   Net net(maniple::my_devices());                                   // `maniple run --devices-per-process 2`
//   // or a Sequential, cut where it is best
//   auto same = maniple::balance(layers, maniple::my_devices(), {.sample = x});
//
// Forward   A placed module moves the tensors among its arguments to its device (those in tuples, pairs, arrays,
//           vectors, maps and optionals as well; not those in structs of your own), and computes there. Its results
//           stay there: the next placed module takes them along, and a loss is computed where the last one is.
// Backward  is autograd's own. Gradients go back the way the activations came, and each is on the device of its
// parameter. As a part A placed module can be registered in a module, put into a Sequential and called like the module
// itself; that is its child
//           "module", so names of parameters are "encoder.module.fc.weight". train(), zero_grad(), to(dtype) reach it;
//           to(device) is refused: it would undo the placement.
// Over ranks DistributedDataParallel takes such a module as any other. Every rank places alike.
//
// Devices. A ComputeDevice is one of LibTorch's, the CPU or a GPU, or a *CPU slot*: a thread that computes forward,
// with intra-op threads and, if they are named, cores of its own. With slots a program for several GPUs runs, and is
// tested, where there are none. Backward of a slot runs in the thread that calls backward(), as all of autograd's work
// on the CPU does; on GPUs each has autograd's thread for it.
//
// Parts work one after the other on one batch: this makes room for a larger model, not speed. For speed see pipeline.h.
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

/// Where a part of a model computes. Copies are the same device.
class ComputeDevice {
 public:
  /// Throws InvalidArgument for a GPU that is not there, Unsupported for what is neither the CPU nor a CUDA device.
  ComputeDevice(torch::Device device);                                           // NOLINT: converts on purpose
  ComputeDevice(torch::DeviceType type) : ComputeDevice(torch::Device(type)) {}  // NOLINT

  const torch::Device& device() const noexcept { return device_; }  ///< where tensors are: cpu, cuda:1
  bool is_slot() const noexcept { return slot_ != nullptr; }
  std::string str() const;  ///< "cuda:1", "cpu", "cpu slot 0"
  friend bool operator==(const ComputeDevice& a, const ComputeDevice& b) noexcept {
    return a.device_ == b.device_ && a.slot_ == b.slot_;
  }

  /// Calls it on the device: that is LibTorch's current one meanwhile; of a slot, in its thread, with the caller's grad
  /// mode and autocast. Returns when it has returned, and throws what it throws. Calls of several threads take turns on
  /// a slot.
  void run(const std::function<void()>& call) const;

 private:
  friend class detail::CpuSlot;
  torch::Device device_;
  std::shared_ptr<detail::CpuSlot> slot_;
};

struct CpuSlotOptions {
  std::vector<int> cores =
      {};           ///< its threads stay on these, as Linux numbers them; empty: on any that the process may use
  int threads = 0;  ///< intra-op threads; 0: one for each of `cores`, or as many as the caller has
};

/// Another slot of the CPU, with a thread that lasts as long as somebody holds the slot. Throws InvalidArgument for
/// cores that this process may not use.
ComputeDevice cpu_slot(const CpuSlotOptions& options = {});

/// The devices of this process: the GPUs that it sees (`maniple run --devices-per-process` gives each rank its own).
/// Where LibTorch sees none: as many CPU slots as --devices-per-process says (MANIPLE_DEVICES_PER_PROCESS), which share
/// LibTorch's intra-op threads; without it, or with 1, the CPU. Every call returns the same ones. Throws
/// InvalidArgument if the process sees fewer GPUs than it was given.
std::vector<ComputeDevice> my_devices();

namespace detail {

/// What placed modules have in common.
class PlacedBase : public torch::nn::Module {
 public:
  const ComputeDevice& compute_device() const noexcept { return device_; }
  bool is_training() const noexcept override;  ///< of the placed module

  /// Throws InvalidArgument unless it is on that device. Other dtypes are fine.
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

  /// The module's forward with any arguments that it takes, defaults included.
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

// The module's forward as it is declared, which is what a Sequential asks for. One that is a template, or overloaded:
// from a tensor to a tensor.
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

/// Moves the module to the device, and every later forward with it. Throws InvalidArgument if the module is null.
template <class Net>
PlacedHolder<Net> place(std::shared_ptr<Net> module, ComputeDevice device) {
  return PlacedHolder<Net>(std::make_shared<PlacedImpl<Net>>(std::move(module), std::move(device)));
}
template <class Net>
PlacedHolder<Net> place(const torch::nn::ModuleHolder<Net>& holder, ComputeDevice device) {
  return place(holder.is_empty() ? nullptr : holder.ptr(), std::move(device));
}

/// The layers of a Sequential in parts, each on a device: what balance() returns. Its parameters have the names that
/// they have in the Sequential ("3.weight"), so that weights and checkpoints of one fit the other.
class PlacedSequentialImpl : public torch::nn::Module {
 public:
  /// Part i begins with layer begins[i] and is on devices[i]. Throws InvalidArgument unless begins is 0 and rises, and
  /// for a parameter of two layers (tied) that would have to be on two devices.
  PlacedSequentialImpl(const torch::nn::Sequential& layers, std::vector<ComputeDevice> devices,
                       std::vector<std::size_t> begins);

  /// The first layer takes a tensor, the last one returns one; between layers of one device anything goes, from device
  /// to device tensors, and vectors, pairs and tuples of up to three.
  torch::Tensor forward(torch::Tensor input);

  const std::vector<ComputeDevice>& devices() const noexcept { return devices_; }
  const std::vector<std::size_t>& begins() const noexcept { return begins_; }
  /// A line for each part: its device, its layers, their bytes.
  std::string text() const;

  /// As of a placed module: throws InvalidArgument if a device is named.
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
  /// An input of the first layer. Given: parts take about equal time; each layer's forward and backward is measured
  /// with it on the first device (on the CPU in processor time, so that other programs do not disturb it). Otherwise
  /// parts have about equally many bytes of parameters and buffers.
  torch::Tensor sample = {};
  int repeats = 5;  ///< a layer's time is the shortest of so many
  /// Times differ from rank to rank, so the ranks of this group all use the cut of its rank 0: collective, where
  /// `sample` is given (on all ranks or none). Null: the default group if there is one, otherwise this process alone.
  std::shared_ptr<ProcessGroup> group = nullptr;
};

/// The layers in as many parts as there are devices, in their order, so that the largest part is as small as it can be.
/// Measuring changes neither buffers nor gradients nor random numbers. Throws InvalidArgument for fewer layers than
/// devices.
PlacedSequential balance(const torch::nn::Sequential& layers, const std::vector<ComputeDevice>& devices,
                         const BalanceOptions& options = {});

/// Where balance() would cut: the first layer of each part.
std::vector<std::size_t> balanced_cut(const torch::nn::Sequential& layers, std::size_t parts,
                                      const ComputeDevice& measured_on, const BalanceOptions& options = {});

/// The same for costs of any kind, one for each layer: of all ways to cut them into `parts` runs of at least one, the
/// one whose largest sum is the smallest. Of several such, the one with the earliest cuts.
std::vector<std::size_t> balanced_cut(const std::vector<double>& costs, std::size_t parts);

}  // namespace maniple
