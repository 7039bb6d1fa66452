// Data-parallel training. Every rank holds the whole model and processes its own part of the batch. Gradients are
// averaged over the ranks during backward, so all ranks take the same step.
//
//   maniple::init_process_group();
//   auto net = std::make_shared<Net>();                       // or a TORCH_MODULE holder, or torch::nn::Sequential
//   maniple::DistributedDataParallel<Net> ddp(net);           // now the weights are rank 0's on all ranks
//   torch::optim::SGD optimizer(net->parameters(), 0.1);
//   for (auto& batch : *loader) {
//     optimizer.zero_grad();
//     auto loss = torch::nll_loss(ddp(batch.data), batch.target);
//     loss.backward();                                        // gradients are averaged when this returns
//     optimizer.step();
//   }
//
// `ddp` is a torch::nn::Module whose child "module" is the wrapped module (see module_wrapper.h). Pass it wherever a
// module is expected. `ddp.module()` returns the wrapped module.
//
// Models of other kinds. DistributedDataParallel<torch::jit::Module> trains a scripted model, for example one saved by
// torch.jit.script in Python. GradientAverager takes named tensors, for models that are not modules. Everything below
// holds for all three classes.
//
// Construction. The constructor compares modules (names, shapes, dtypes, strides, requires_grad) and options across the
// ranks, and throws an error that names the first difference. Then it copies rank 0's parameters and buffers to all
// ranks.
//
// Backward. The first synchronised backward records the order in which gradients become ready. At its end the gradients
// are assigned to *buckets*, in rank 0's order. Each later backward averages a bucket once all its gradients are ready.
// With gradient_as_bucket_view the gradients live in the buckets, in memory shared by all ranks of a host, and are
// averaged in place without a copy. At the end of a synchronised backward, rank 0's buffers (batch norm's running
// statistics) are copied to all ranks. Between steps all ranks therefore hold the same module, and any rank may
// evaluate or save it.
//
// Forward is the wrapped module's own: `ddp(x)`, `ddp->forward(x)` and `net->forward(x)` do the same, and none of them
// communicates.
//
// Contract. All ranks run the same sequence of synchronised backwards on the wrapped module. Several forwards before a
// backward, and several backwards before a step, are allowed. Not supported, and reported as errors: backward with
// create_graph, sparse gradients, converting the module or replacing its parameters after it was wrapped.
//
// GPUs. Parameters may be on the CPU and on GPUs; a bucket holds gradients of one device. GPU gradients are averaged on
// a separate stream. Work submitted later to the current stream runs after the average; the host does not wait.
//
// Ranks with different numbers of batches: see uneven_inputs.h.
//
// Errors are thrown by backward(). If a parameter received no gradient, all ranks throw an error that names it, and the
// group is aborted (unless find_unused_parameters or static_graph is on). `PeerLost` names a rank that died. If the
// program's own code throws during backward, the group is aborted if that backward has already communicated; otherwise
// the backward is discarded.
//
// Threads: one thread at a time, normally the thread that calls backward. The wrapper, the module, the optimizer and
// the group may be destroyed in any order; gradients stay valid.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/jit/api/module.h>
#include <torch/torch.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>
#include <maniple/train/comm_hooks.h>
#include <maniple/train/module_wrapper.h>

namespace MANIPLE_API maniple {

/// Sizes and times of a DistributedDataParallel. Times are in milliseconds and measured on this rank.
///
///   std::cout << ddp.statistics().text();
struct DdpStatistics {
  struct Bucket {
    std::string dtype;                    ///< "float32"
    std::uint64_t bytes = 0;              ///< including the padding between parameters
    std::vector<std::string> parameters;  ///< in the order in which their gradients become ready
  };

  int ranks = 1;
  std::string overlap;               ///< the effective setting: "none", "inline" or "thread"
  std::vector<Bucket> buckets;       ///< empty until the first synchronised backward has ended
  std::uint64_t parameters = 0;      ///< trained parameters
  std::uint64_t gradient_bytes = 0;  ///< reduced in each synchronised backward
  std::uint64_t backwards = 0;       ///< synchronised backwards, including the first, which lays out the buckets

  // Means over the synchronised backwards after the first, and the values of the last one.
  double backward_ms = 0;  ///< from the first gradient to the end of backward
  double comm_ms = 0;      ///< time during which buckets were being averaged
  double wait_ms = 0;      ///< time during which backward waited for averages
  double last_backward_ms = 0;
  double last_comm_ms = 0;
  double last_wait_ms = 0;

  /// The share of communication hidden behind computation: 1 - wait_ms / comm_ms, or 0 without communication.
  double overlap_fraction() const noexcept { return comm_ms > 0 && wait_ms < comm_ms ? 1 - wait_ms / comm_ms : 0; }

  /// A summary of a few lines.
  std::string text() const;
};

/// When backward averages its buckets.
enum class Overlap : std::uint8_t {
  /// Several hosts, or gradients on a GPU: `thread`. One host: `thread` if there are at least 2 MiB of gradients and
  /// spare cores (at least two physical cores for each computing thread of the ranks); otherwise `none`.
  automatic,
  /// At the end of backward, one bucket after the other, so ranks wait for each other once. Within a host there is
  /// little latency to hide.
  none,
  /// As soon as a bucket is complete, in the thread that runs backward. The data is still in the cache, but ranks wait
  /// for each other at every bucket.
  inline_,
  /// As soon as a bucket is complete, in the group's own thread, while backward continues. Hides network time, but
  /// takes a core from the computation.
  thread,
};

/// How the gradients of the ranks are averaged.
enum class Average : std::uint8_t {
  /// The sum over ranks of g_r, divided by the number of ranks: right when all ranks have the same number of samples.
  ranks,
  /// The sum of w_r g_r, divided by the sum of w_r, with w_r from set_weight: right when batch sizes differ and the
  /// loss is a mean.
  samples,
};

struct DdpOptions {
  /// Approximate bucket size. Larger buckets mean fewer, more efficient operations; with smaller ones communication
  /// starts earlier. A single parameter is never split.
  double bucket_cap_mb = 25;
  /// The first bucket to complete is kept small, so that communication starts early.
  double first_bucket_mb = 1;

  /// Allows some parameters to receive no gradient in a backward; the set may differ between ranks. A parameter unused
  /// on one rank counts as zero there. A parameter unused on all ranks keeps its gradient unchanged (an undefined
  /// gradient stays undefined). Costs one small all_reduce at the end of each backward; buckets with unused parameters
  /// are averaged at the end.
  bool find_unused_parameters = false;

  /// Promises that every backward produces gradients for the same parameters as the first. Parameters without a
  /// gradient in the first backward are then accepted, without further communication. A backward that breaks the
  /// promise throws an error that names the parameter.
  bool static_graph = false;

  /// Gradients live in the buckets: one copy, and no copying to and from the bucket. Off: gradients stay where autograd
  /// puts them, and are copied to the bucket and back; needed by programs that keep gradient tensors across steps.
  bool gradient_as_bucket_view = true;

  /// Copy rank 0's buffers to all ranks at the end of each synchronised backward.
  bool broadcast_buffers = true;

  /// Copy rank 0's parameters and buffers to all ranks at construction. Off: the caller guarantees that they are equal.
  bool init_sync = true;

  /// Null: the default group of init_process_group.
  std::shared_ptr<ProcessGroup> group = nullptr;

  /// The GPU of this rank, like PyTorch's device_ids = [local_rank]: empty, or one index. All parameters must be on
  /// that GPU; the constructor checks this and moves nothing. Leave it empty for a module on the CPU or on several
  /// GPUs.
  std::vector<int> device_ids = {};

  Overlap overlap = Overlap::automatic;
  Average average = Average::ranks;

  /// Names of parameters whose gradients are averaged last, in buckets of their own, whenever they become ready. Such a
  /// parameter may receive its gradient in several pieces during one backward (from a nested backward, as activation
  /// re-computation runs it); for other parameters that is an error. At least one parameter must not be delayed and
  /// must receive a gradient in every backward.
  std::vector<std::string> delay_all_reduce_named_params = {};
  /// When the gradient of this parameter is ready, the delayed gradients are complete, and their average begins. Empty:
  /// it begins at the end of backward. A delayed gradient that becomes ready later than that is an error that names
  /// both parameters.
  std::string param_to_hook_all_reduce = {};
};

/// Makes the optimizer of one parameter: see GradientAverager::apply_optimizer_in_backward.
using OptimizerFactory =
    std::function<std::shared_ptr<torch::optim::Optimizer>(const std::string& name, const torch::Tensor& parameter)>;

namespace detail {
class Reducer;  // src/train/ddp/reducer.h
}

/// While it exists, backward does not communicate: each rank accumulates its gradients locally. The first backward
/// after it averages the sum.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(std::shared_ptr<detail::Reducer> reducer);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<detail::Reducer> reducer_;
};

/// Tensors with their names.
using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// DistributedDataParallel for tensors outside a module:
///
///   maniple::GradientAverager ddp({{"weight", weight}, {"bias", bias}}, {{"running_mean", mean}});
///   loss_of(weight, bias, mean).backward();                  // the gradients of weight and bias are averaged
///
/// Parameters are leaves of the graph. Parameters that require no gradient are only copied from rank 0 at construction.
/// All ranks pass the same names in the same order.
class GradientAverager {
 public:
  /// Collective over the group.
  explicit GradientAverager(NamedTensors parameters, NamedTensors buffers = {}, DdpOptions options = {});
  virtual ~GradientAverager();
  GradientAverager(GradientAverager&&) noexcept;
  GradientAverager& operator=(GradientAverager&&) noexcept;

  /// See NoSync: `{ auto guard = ddp.no_sync(); loss.backward(); }`. May be nested.
  NoSync no_sync();

  /// The weight of this rank's gradient in the following backwards, with Average::samples; normally the number of
  /// samples in its batch. Not negative, and the sum over ranks must not be zero. Stays in effect until set again.
  void set_weight(double weight);

  /// Replaces the plain average of a bucket by `hook`; see comm_hooks.h. Call it before the first backward, with the
  /// same hook on all ranks.
  void register_comm_hook(CommHook hook);

  /// Runs the optimizer inside backward. As soon as a bucket is averaged its parameters are stepped, while backward
  /// continues with the others (with Overlap::thread, in the group's thread). When backward returns all parameters have
  /// been stepped; the program does not call step(). This function calls `make` once for each parameter, so each
  /// parameter may have its own options:
  ///
  ///   ddp.apply_optimizer_in_backward([](const std::string& name, const torch::Tensor& parameter) {
  ///     return std::make_shared<torch::optim::AdamW>(std::vector{parameter}, torch::optim::AdamWOptions(1e-3));
  ///   });
  ///
  /// The result is bit for bit the same as with one optimizer over all parameters after backward. Gradients remain
  /// after the step: zero them as usual. Under no_sync nothing is stepped; the next synchronised backward steps with
  /// the average of the accumulated gradients. Several synchronised backwards make several steps. With
  /// find_unused_parameters the steps run at the end of backward, when it is known which parameters were used. Works
  /// with every optimizer whose step() needs no closure (LBFGS needs one). Call it once, before the first backward,
  /// with the same optimizers on all ranks. A backward that fails may leave some parameters stepped and others not: go
  /// back to a checkpoint.
  void apply_optimizer_in_backward(const OptimizerFactory& make);
  /// The optimizers made by apply_optimizer_in_backward, in the order of the module's parameters that require a
  /// gradient; for learning rates and checkpoints. Empty if there are none.
  std::vector<std::shared_ptr<torch::optim::Optimizer>> optimizers() const;

  /// Sizes and times. Does not communicate.
  DdpStatistics statistics() const;

  /// The parameters that require a gradient.
  std::vector<torch::Tensor> trained_parameters() const;

  const DdpOptions& options() const noexcept;
  const std::shared_ptr<ProcessGroup>& group() const noexcept;

  const std::shared_ptr<detail::Reducer>& reducer() const noexcept { return reducer_; }  ///< internal

 protected:
  explicit GradientAverager(std::shared_ptr<detail::Reducer> reducer) : reducer_(std::move(reducer)) {}
  void require_unchanged() const;

 private:
  std::shared_ptr<detail::Reducer> reducer_;
};

namespace detail {

/// DistributedDataParallel for modules of any class.
class DdpBase : public ModuleWrapper, public GradientAverager {
 public:
  DdpBase(const std::shared_ptr<torch::nn::Module>& module, DdpOptions options);
  ~DdpBase() override;
  DdpBase(DdpBase&&) noexcept;
  DdpBase& operator=(DdpBase&&) noexcept;

  /// Loads the wrapped module. Does not communicate: every rank loads the same archive.
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace detail

/// `Net` is a module class or a holder made with TORCH_MODULE; `maniple::DistributedDataParallel ddp(net)` deduces it.
template <class Net>
class DistributedDataParallel : public detail::DdpBase {
 public:
  using Module = typename detail::ModuleOf<Net>::type;

  /// Collective over the group.
  explicit DistributedDataParallel(std::shared_ptr<Module> module, DdpOptions options = {})
      : DdpBase(module, std::move(options)), module_(std::move(module)) {}
  explicit DistributedDataParallel(const torch::nn::ModuleHolder<Module>& holder, DdpOptions options = {})
      : DistributedDataParallel(holder.ptr(), std::move(options)) {}

  /// Calls the wrapped module's forward. Never communicates. Throws InvalidArgument if a parameter was converted to
  /// another dtype or device since construction (LibTorch drops the hooks of such a parameter) or replaced by another.
  template <class... Arguments>
  decltype(auto) forward(Arguments&&... arguments) const {
    require_unchanged();
    return module_->forward(std::forward<Arguments>(arguments)...);
  }
  template <class... Arguments>
  decltype(auto) operator()(Arguments&&... arguments) const {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// Returns itself, so that it works like a holder: ddp->forward(x), ddp->train(), ddp->parameters().
  const DistributedDataParallel* operator->() const noexcept { return this; }
  DistributedDataParallel* operator->() noexcept { return this; }
  const std::shared_ptr<Module>& module() const noexcept { return module_; }  ///< the wrapped module

 private:
  std::shared_ptr<Module> module_;
};

/// A scripted model, made in C++ or loaded from a file written by torch.jit.script(...).save in Python.
///
///   maniple::DistributedDataParallel<torch::jit::Module> ddp(torch::jit::load("net.pt"));
///   ddp.train();
///   torch::optim::SGD optimizer(ddp.parameters(), 0.1);
///   torch::nll_loss(ddp(batch.data).toTensor(), batch.target).backward();
///
/// `ddp.module()` is the same model (copies of a torch::jit::Module share their state): module().save("net.pt") saves
/// it for Python.
template <>
class DistributedDataParallel<torch::jit::Module> : public GradientAverager {
 public:
  using Module = torch::jit::Module;

  /// Collective over the group.
  explicit DistributedDataParallel(torch::jit::Module module, DdpOptions options = {});

  /// Calls the model's forward. Never communicates. Throws under the same conditions as with other modules.
  c10::IValue forward(std::vector<c10::IValue> inputs);
  template <class... Arguments>
  c10::IValue operator()(Arguments&&... arguments) {
    return forward({c10::IValue(std::forward<Arguments>(arguments))...});
  }

  void train(bool on = true) { module_.train(on); }
  void eval() { module_.eval(); }
  std::vector<torch::Tensor> parameters() const;
  const torch::jit::Module& module() const noexcept { return module_; }
  torch::jit::Module& module() noexcept { return module_; }

 private:
  torch::jit::Module module_;
};

DistributedDataParallel(torch::jit::Module) -> DistributedDataParallel<torch::jit::Module>;
DistributedDataParallel(torch::jit::Module, DdpOptions) -> DistributedDataParallel<torch::jit::Module>;
template <class Module>
DistributedDataParallel(std::shared_ptr<Module>) -> DistributedDataParallel<Module>;
template <class Module>
DistributedDataParallel(std::shared_ptr<Module>, DdpOptions) -> DistributedDataParallel<Module>;
template <class Holder>
  requires torch::detail::is_module_holder<Holder>::value
DistributedDataParallel(Holder) -> DistributedDataParallel<Holder>;
template <class Holder>
  requires torch::detail::is_module_holder<Holder>::value
DistributedDataParallel(Holder, DdpOptions) -> DistributedDataParallel<Holder>;

}  // namespace maniple
