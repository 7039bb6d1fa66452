// Data parallelism in one process: a batch is cut into parts, each part runs through a replica of the module on its own
// device, and the outputs are concatenated. To the program it is one module on one batch.
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
// Several processes (DistributedDataParallel) gather no outputs and have no thread that all wait for, so they scale
// further; DataParallel needs no launcher and no change of the program.
//
// `dp` is a torch::nn::Module whose child "module" is the wrapped module (see module_wrapper.h). Pass it wherever a
// module is expected. `dp.module()` returns the wrapped module.
//
// Forward:
//   Scatter  Every tensor argument is cut along `dim`, as by torch::chunk: 5 rows on 4 devices become 2, 2 and 1, so
//            three devices work. A batch of one row, or of none, runs through the module itself. Tensors may be
//            arguments of their own or inside tuples, pairs, arrays, vectors, maps and optionals. Everything else
//            (numbers, strings, undefined tensors, your own structs) is passed to every replica unchanged.
//   Replicas Made once. Replicas on the module's device share its parameters, so they see an optimizer's step at once;
//            replicas on other devices are refreshed. Changes by train(), eval(), to(dtype) and requires_grad_(), and
//            of buffers, reach the replicas at the next forward. Plain members do not: they keep their values from the
//            time when the DataParallel was made.
//   Apply    Each replica's forward runs in its own permanent thread, with the caller's grad mode, inference mode and
//            autocast, and with its share of the caller's intra-op threads.
//   Gather   Result tensors are concatenated along `dim` on `output_device`. A result without dimensions becomes an
//            element of a vector with one element per replica, as in PyTorch: a module that returns its loss gives you
//            a vector of losses; take the mean. (It is a mean of means: with parts of different sizes it differs from
//            the mean over all rows.)
//
// Backward. Each replica's graph is traversed in its own thread. Gradients are summed in replica order and reach the
// module's parameters (and arguments that require a gradient) through autograd, as from any other operation: they
// accumulate over several backwards, hooks run once, and an optimizer finds them in `grad`. They equal the gradients of
// the module on the whole batch if a row's output depends on that row alone. Batch norm's output does not: each replica
// normalises its own part, and the first replica's running statistics are kept, as in PyTorch.
//
// Copies. The module is cloned, so it must be a torch::nn::Cloneable (Sequential and all modules of LibTorch are) that
// registers everything in reset(). Otherwise pass a factory:
//
//   maniple::DataParallel dp(net, {.devices = devices}, [] { return std::make_shared<Net>(); });
//
// Errors. Calls that can never work throw InvalidArgument: no devices, a missing device, a module on another device or
// one that cannot be copied, arguments with different numbers of rows. An exception in a replica becomes a ReplicaError
// with the replica's number and device, thrown after all replicas have ended; the next forward works normally. Backward
// with create_graph, and modules with synchronised batch norm, throw Unsupported.
//
// Random numbers. All replicas draw from LibTorch's single generator, in no fixed order. A module with dropout
// therefore uses different masks in each run, whatever the seed.
//
// Threads: one forward or backward at a time; other callers wait. The destructor ends the replicas' threads; graphs
// that still exist can be traversed afterwards.
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
  /// One replica per entry; the module must be on the first device. A device may appear more than once.
  std::vector<torch::Device> devices = {};
  /// Where results are concatenated; default: the first device.
  std::optional<torch::Device> output_device = {};
  /// The batch dimension, in arguments and results.
  std::int64_t dim = 0;
  /// Intra-op threads of each CPU replica. 0: the caller's number divided by the number of CPU replicas.
  int threads = 0;
  /// Replicas on the module's device use its parameters directly. Off: each replica but the first has its own copy,
  /// refreshed in every forward; worth trying on a machine with several NUMA nodes.
  bool share_parameters = true;
};

/// An exception from a replica, in forward or backward. The original is nested in it (std::rethrow_if_nested). The kind
/// is the original's if it is an Error, otherwise `aborted`.
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

/// The part of DataParallel that does not depend on the module's class.
class DataParallelBase : public ModuleWrapper {
 public:
  using Factory = std::function<std::shared_ptr<torch::nn::Module>()>;  ///< null: the module is cloned

  DataParallelBase(const std::shared_ptr<torch::nn::Module>& module, DataParallelOptions options, const Factory& make);
  ~DataParallelBase() override;
  DataParallelBase(DataParallelBase&&) noexcept;
  DataParallelBase& operator=(DataParallelBase&&) noexcept;

  /// With normalized devices: `cuda` has become `cuda:0`.
  const DataParallelOptions& options() const noexcept;

 protected:
  using Tensors = std::vector<torch::Tensor>;
  /// Runs a replica on its part of the tensors, and returns its result tensors.
  using Call = std::function<Tensors(torch::nn::Module& replica, std::size_t index, const Tensors& inputs)>;
  Tensors run(const Tensors& inputs, const Call& call) const;

 private:
  class State;
  std::shared_ptr<State> state_;
};

// The class that defines clone(); torch::nn::Module's own clone() only throws.
template <class Class, class Device>
std::type_identity<Class> class_of(std::shared_ptr<torch::nn::Module> (Class::*)(Device) const);
template <class Module>
constexpr bool kCloneable = !std::is_same_v<typename decltype(class_of(&Module::clone))::type, torch::nn::Module>;

}  // namespace detail

/// `Net` is a module class or a holder made with TORCH_MODULE; `maniple::DataParallel dp(net, options)` deduces it.
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

  /// `make` is called once per device and returns a std::shared_ptr<Module>, or a holder, with the same parameters and
  /// buffers in the same order. Their values do not matter.
  template <class Make>
    requires std::is_invocable_v<Make>
  DataParallel(std::shared_ptr<Module> module, DataParallelOptions options, Make make)
      : DataParallelBase(module, std::move(options), factory(std::move(make))), module_(std::move(module)) {}
  template <class Make>
    requires std::is_invocable_v<Make>
  DataParallel(const torch::nn::ModuleHolder<Module>& holder, DataParallelOptions options, Make make)
      : DataParallel(holder.ptr(), std::move(options), std::move(make)) {}

  /// Runs the module's forward in parallel; see above. Results: a tensor, or tuples, vectors, maps ... of tensors.
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

  /// Returns itself, so that it works like a holder: dp->forward(x), dp->train(), dp->parameters().
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
