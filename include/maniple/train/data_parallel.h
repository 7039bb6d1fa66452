// One process, several devices: a batch is cut into parts, each part goes through a replica of the module on a device
// of its own, and the outputs are concatenated. To the program it is one module on one batch.
//
//   auto net = std::make_shared<Net>();                                  // or a TORCH_MODULE holder, or Sequential
//   maniple::DataParallel dp(net, {.devices = {torch::kCPU, torch::kCPU}});
//   torch::optim::SGD optimizer(net->parameters(), 0.1);
//   for (auto& batch : *loader) {
//     optimizer.zero_grad();
//     auto loss = torch::nll_loss(dp(batch.data), batch.target);
//     loss.backward();                                                   // the replicas' backwards run in parallel too
//     optimizer.step();
//   }
//
// A device may be named several times: {cpu, cpu} uses two cores, with a thread and an autograd graph for each replica.
// With several processes (DistributedDataParallel) no outputs are gathered and nothing waits in one thread, so that
// scales further; this needs no launcher and no change of the program.
//
// It is a torch::nn::Module itself, with the wrapped one as its child "module" (see module_wrapper.h): pass it wherever
// a module is expected. `dp.module()` is the wrapped module, for its other members.
//
// What happens in forward.
//   Scatter  Every tensor among the arguments is cut along `dim` as torch::chunk does it: 5 rows on 4 devices are 2, 2
//            and 1, so three devices work; a batch of one row, or of none, goes through the module itself. Tensors may
//            be arguments of their own or in tuples, pairs, arrays, vectors, maps and optionals. Whatever else there is
//            (numbers, strings, undefined tensors, structs of your own) goes to every replica as it is.
//   Replicas They are made once. Those on the module's device share its parameters, so an optimizer's step reaches them
//            by itself; on other devices they are refreshed. train(), eval(), to(dtype) and requires_grad_() of the
//            module reach them at the next forward, and so do its buffers. Plain members do not: they are what they
//            were when the DataParallel was made.
//   Apply    Each replica's forward runs in its own lasting thread, with the caller's grad mode, inference mode and
//            autocast, and with its share of the caller's intra-op threads.
//   Gather   The tensors of the results are concatenated along `dim` on `output_device`. A result without dimensions
//            becomes an element of a vector with one element for each replica, as in PyTorch: a module that returns its
//            loss gives you a vector of losses; take the mean. (It is the mean of means: with uneven parts not the same
//            as that over all rows.)
//
// In backward each replica's graph is walked in its own thread; the gradients are added in the order of replicas and
// reach the module's parameters (and arguments that require a gradient) through autograd, as from any other operation:
// they add up over several backwards, hooks see them once, an optimizer finds them in `grad`. They are those of the
// module on the whole batch, as long as a row's output depends on that row alone. Batch norm's does not: each replica
// normalises its own part, and the running statistics that stay are those of the first, as in PyTorch.
//
// The module is cloned, so it must be a torch::nn::Cloneable (Sequential and all modules of LibTorch are) with what it
// registers made in reset(); or give a factory that makes another:
//
//   maniple::DataParallel dp(net, {.devices = devices}, [] { return std::make_shared<Net>(); });
//
// Errors. InvalidArgument for what can never work: no devices, a device that is not there, a module that is elsewhere
// or cannot be copied, arguments with different numbers of rows. What a replica throws becomes a ReplicaError with the
// replica's number and device, once all replicas have ended; nothing is left behind, and the next forward is fine.
// Unsupported for backward with create_graph, and for modules with synchronised batch norm.
//
// Random numbers: all replicas draw from LibTorch's one generator, in no fixed order. So a module with
// dropout gives other masks in each run, whatever the seed.
//
// Threads: one forward or backward at a time; others wait. Destroying it ends its threads; graphs that are still held
// can be walked nevertheless.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <maniple/comm/error.h>
#include <maniple/export.h>
#include <maniple/train/module_wrapper.h>
#include <maniple/train/tensor_nest.h>

namespace MANIPLE_API maniple {

struct DataParallelOptions {
  /// One replica for each; the module must be on the first. A device may appear more than once.
  std::vector<torch::Device> devices = {};
  /// Where the results are concatenated; default: the first device.
  std::optional<torch::Device> output_device = {};
  /// The dimension of the batch, in arguments and results.
  std::int64_t dim = 0;
  /// Intra-op threads of each replica on the CPU. 0: the caller's number divided by the number of such replicas.
  int threads = 0;
  /// Replicas on the module's own device use its parameters where they are. Off: each but the first has its own copy,
  /// refreshed in every forward; worth trying on a machine with several memory nodes.
  bool share_parameters = true;
};

/// What a replica threw, in forward or backward. The exception itself is nested in it (std::rethrow_if_nested). Its
/// kind is that of the exception if that is an Error, otherwise `aborted`.
class ReplicaError : public Error {
 public:
  ReplicaError(ErrorKind kind, const std::string& text, std::size_t replica, torch::Device device)
      : Error(kind, text), replica_(replica), device_(device) {}
  std::size_t replica() const noexcept { return replica_; }
  torch::Device device() const noexcept { return device_; }

 private:
  std::size_t replica_;
  torch::Device device_;
};

namespace detail {

/// What DataParallel does, for any module.
class DataParallelBase : public ModuleWrapper {
 public:
  using Factory = std::function<std::shared_ptr<torch::nn::Module>()>;  ///< null: the module is cloned

  DataParallelBase(const std::shared_ptr<torch::nn::Module>& module, DataParallelOptions options, const Factory& make);
  ~DataParallelBase() override;
  DataParallelBase(DataParallelBase&&) noexcept;
  DataParallelBase& operator=(DataParallelBase&&) noexcept;

  /// With the devices as they were understood: `cuda` has become `cuda:0`.
  const DataParallelOptions& options() const noexcept;

 protected:
  using Tensors = std::vector<torch::Tensor>;
  /// Runs a replica on its part of the tensors; the results' tensors.
  using Call = std::function<Tensors(torch::nn::Module& replica, std::size_t index, const Tensors& inputs)>;
  Tensors run(const Tensors& inputs, const Call& call) const;

 private:
  class State;
  std::shared_ptr<State> state_;
};

// Where clone() was written: torch::nn::Module's own only throws.
template <class Class, class Device>
std::type_identity<Class> class_of(std::shared_ptr<torch::nn::Module> (Class::*)(Device) const);
template <class Module>
constexpr bool kCloneable = !std::is_same_v<typename decltype(class_of(&Module::clone))::type, torch::nn::Module>;

}  // namespace detail

/// `Net` is a module class or a holder made with TORCH_MODULE; `maniple::DataParallel dp(net, options)` finds it out.
template <class Net>
class DataParallel : public detail::DataParallelBase {
 public:
  using Module = typename detail::ModuleOf<Net>::type;

  DataParallel(std::shared_ptr<Module> module, DataParallelOptions options)
      : DataParallelBase(module, std::move(options), nullptr), module_(std::move(module)) {
    static_assert(
        detail::kCloneable<Module>,
        "DataParallel copies the module: derive it from torch::nn::Cloneable<Net> and make what it registers in "
        "reset(), or give DataParallel a factory: DataParallel<Net> dp(net, options, [] { return "
        "std::make_shared<Net>(); })");
  }
  DataParallel(const torch::nn::ModuleHolder<Module>& holder, DataParallelOptions options)
      : DataParallel(holder.ptr(), std::move(options)) {}

  /// `make` is called once for each device and returns a std::shared_ptr<Module>, or a holder, with the same parameters
  /// and buffers in the same order. Their values do not matter.
  template <class Make>
    requires std::is_invocable_v<Make>
  DataParallel(std::shared_ptr<Module> module, DataParallelOptions options, Make make)
      : DataParallelBase(module, std::move(options), factory(std::move(make))), module_(std::move(module)) {}
  template <class Make>
    requires std::is_invocable_v<Make>
  DataParallel(const torch::nn::ModuleHolder<Module>& holder, DataParallelOptions options, Make make)
      : DataParallel(holder.ptr(), std::move(options), std::move(make)) {}

  /// The module's forward, in parallel; see above. Results: a tensor, or tuples, vectors, maps ... of tensors.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) const {
    using Given = std::tuple<std::decay_t<Arguments>...>;
    using Output = std::decay_t<decltype(std::declval<Module&>().forward(std::declval<std::decay_t<Arguments>>()...))>;
    static_assert(detail::Nest<Output>::kOnlyTensors,
                  "DataParallel can concatenate tensors, and tuples, pairs, arrays, vectors, maps and optionals of "
                  "tensors; the "
                  "module's forward returns something else");
    const Given given(std::forward<Arguments>(arguments)...);
    std::optional<Output> first;
    const Tensors gathered =
        run(detail::tensors_in(given), [&](torch::nn::Module& replica, std::size_t index, const Tensors& inputs) {
          Output output =
              std::apply([&](auto&&... part) { return dynamic_cast<Module&>(replica).forward(std::move(part)...); },
                         detail::with_tensors(given, inputs));
          Tensors tensors = detail::tensors_in(output);
          if (index == 0) first = std::move(output);
          return tensors;
        });
    return detail::with_tensors(*first, gathered);
  }
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) const {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// Itself, so that it is used as a holder is: dp->forward(x), dp->train(), dp->parameters().
  const DataParallel* operator->() const noexcept { return this; }
  DataParallel* operator->() noexcept { return this; }
  const std::shared_ptr<Module>& module() const noexcept { return module_; }  ///< the wrapped module

 private:
  template <class Make>
  static Factory factory(Make make) {
    return [make = std::move(make)]() -> std::shared_ptr<torch::nn::Module> {
      if constexpr (std::is_convertible_v<std::invoke_result_t<const Make&>, std::shared_ptr<Module>>) {
        return make();
      } else {
        return make().ptr();
      }
    };
  }

  std::shared_ptr<Module> module_;
};

template <class Module, class... More>
DataParallel(std::shared_ptr<Module>, DataParallelOptions, More...) -> DataParallel<Module>;
template <class Holder, class... More>
  requires torch::detail::is_module_holder<Holder>::value
DataParallel(Holder, DataParallelOptions, More...) -> DataParallel<Holder>;

}  // namespace maniple
