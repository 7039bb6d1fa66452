// Data-parallel training: every rank holds the whole model and works on its own part of the batch; gradients are
// averaged over the ranks during backward, so that all take the same step.
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
// What happens. The constructor compares the modules of all ranks (names, shapes, dtypes, strides, requires_grad) and
// the options, and names the first difference; then it copies rank 0's parameters and buffers to all. Hooks on the
// parameters notice each gradient as autograd finishes it. The first synchronised backward records the order in which
// gradients are ready; at its end *buckets* are laid out in rank 0's order, and each later backward averages a bucket
// once all its gradients are ready. With gradient_as_bucket_view the gradients themselves live in the buckets, in
// memory that all ranks of a host map: there is one copy of them, and they are averaged where they lie.
//
// It is a torch::nn::Module itself, with the wrapped one as its child "module" (see module_wrapper.h): pass it wherever
// a module is expected. `ddp.module()` is the wrapped module, for its other members.
//
// Two more faces of the same: DistributedDataParallel<torch::jit::Module> trains a scripted model, such as
// torch.jit.script has saved in Python; GradientAverager takes parameters and buffers as lists of tensors, for models
// that are no modules at all. What is said here of modules is said of all three.
//
// forward is the wrapped module's own: nothing is intercepted, so `ddp(x)`, `ddp->forward(x)` and `net->forward(x)` do
// the same, and none of them communicates. What must happen once in each step happens in backward, where all ranks are
// sure to be: at the end of a synchronised backward, buffers (batch norm's running statistics) become rank 0's on all
// ranks. So between steps all ranks hold the same module, and any rank may evaluate or save it.
//
// Contract: all ranks run the same sequence of synchronised backwards on the wrapped module. Several forwards before a
// backward, and several backwards before a step, are fine. Not supported, with an error that says so: backward with
// create_graph, sparse gradients, a module that is converted or gets other parameters
// after it was wrapped.
//
// On GPUs. Parameters may be on the CPU and on GPUs; each bucket has gradients of one device. Those of a GPU are
// averaged on a stream beside that of backward, and what follows on the current stream comes after them: the host does
// not wait.
//
// Ranks with different numbers of batches: see uneven_inputs.h.
//
// Errors are thrown by backward(). A parameter that got no gradient is named on all ranks, and the group is aborted
// (unless find_unused_parameters or static_graph is on). A rank that died is named by `PeerLost`. A backward that
// throws half-way, in code of the program's own, aborts the group if it has communicated, and is forgotten if it has
// not.
//
// Threads: one thread at a time, normally the one that calls backward. Destroy it in any order with the module, the
// optimizer and the group; gradients stay valid.
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

/// What DistributedDataParallel can say about itself. Times are this rank's own, in milliseconds.
///
///   std::cout << ddp.statistics().text();
struct DdpStatistics {
  struct Bucket {
    std::string dtype;                    ///< "float32"
    std::uint64_t bytes = 0;              ///< with the padding between parameters
    std::vector<std::string> parameters;  ///< in the order in which their gradients are ready
  };

  int ranks = 1;
  std::string overlap;               ///< "none", "inline", "thread": what `automatic` became
  std::vector<Bucket> buckets;       ///< empty before the end of the first synchronised backward
  std::uint64_t parameters = 0;      ///< that take part
  std::uint64_t gradient_bytes = 0;  ///< reduced in each synchronised backward
  std::uint64_t backwards = 0;       ///< synchronised ones, the first (which lays out the buckets) included

  // Means over the synchronised backwards after the first, and the last one of them.
  double backward_ms = 0;  ///< from the first gradient to the end of backward
  double comm_ms = 0;      ///< during which buckets were being averaged
  double wait_ms = 0;      ///< during which backward stood still for it
  double last_backward_ms = 0;
  double last_comm_ms = 0;
  double last_wait_ms = 0;

  /// The part of the communication that was hidden behind computation: 1 - wait_ms / comm_ms, 0 where nothing was
  /// communicated.
  double overlap_fraction() const noexcept { return comm_ms > 0 && wait_ms < comm_ms ? 1 - wait_ms / comm_ms : 0; }

  /// A few lines for people.
  std::string text() const;
};

/// When the buckets of a backward are averaged.
enum class Overlap : std::uint8_t {
  /// Several hosts: thread. One host: thread when there are cores that no rank computes on (two physical ones or more
  /// for each computing thread) and at least 2 MiB of gradients, otherwise none.
  automatic,
  /// At the end of backward, one after the other: ranks wait for each other once. Within a host there is little to
  /// hide.
  none,
  /// As soon as a bucket is complete, in the thread of backward: fresh from the cache, but ranks wait for each other
  /// at every bucket.
  inline_,
  /// As soon as a bucket is complete, in the group's own thread, while backward goes on. Hides the network; takes a
  /// core from the computation.
  thread,
};

/// What the average is.
enum class Average : std::uint8_t {
  /// The sum over ranks of g_r, divided by the number of ranks: right when all ranks have equally many samples.
  ranks,
  /// The sum of w_r g_r / the sum of w_r, with w_r from set_weight: right when batches differ in size and the loss is a
  /// mean.
  samples,
};

struct DdpOptions {
  /// Gradients travel in buckets of about this size. Larger: fewer, more efficient operations; smaller: communication
  /// can begin earlier. A single parameter is never divided.
  double bucket_cap_mb = 25;
  /// The first bucket to be complete is kept small, so that communication begins early.
  double first_bucket_mb = 1;

  /// Allows that some parameters get no gradient in a backward, not even the same ones on all ranks. On a rank where
  /// one is unused it counts as zero; one that is unused on all ranks keeps its gradient as it was (none stays none).
  /// Costs one small all_reduce at the end of each backward, and buckets with unused parameters are averaged at the
  /// end.
  bool find_unused_parameters = false;

  /// Promises that every backward produces gradients for the same parameters as the first. Then parameters that got
  /// none there are accepted, without further exchange. A backward that breaks the promise is an error that names the
  /// parameter.
  bool static_graph = false;

  /// Gradients live in the buckets: one copy, no copying once there. Off: gradients stay where autograd puts them, and
  /// are copied to the bucket and back; for programs that keep hold of gradient tensors from step to step.
  bool gradient_as_bucket_view = true;

  /// Rank 0's buffers are copied to all ranks at the end of each synchronised backward.
  bool broadcast_buffers = true;

  /// Rank 0's parameters and buffers are copied to all ranks at construction. Off: the caller vouches that they are
  /// equal.
  bool init_sync = true;

  /// Null: the default group of init_process_group.
  std::shared_ptr<ProcessGroup> group = nullptr;

  /// The GPU of this rank, as PyTorch's device_ids = [local_rank]: empty, or one index, which must be that of all
  /// parameters. It moves nothing; it is a check that the module is where it was meant to be. Empty for a module on the
  /// CPU or on several GPUs.
  std::vector<int> device_ids = {};

  Overlap overlap = Overlap::automatic;
  Average average = Average::ranks;

  /// Parameters, by their names in the module, whose gradients are averaged last, in buckets of their own, whatever the
  /// order in which they are ready. Such a parameter may get its gradient in several pieces during one backward (a
  /// backward inside a backward, as re-computation of activations does), which is an error for others. At least one
  /// parameter is not delayed and gets a gradient in every backward.
  std::vector<std::string> delay_all_reduce_named_params = {};
  /// The parameter whose gradient says that those of the delayed ones are complete; their average begins then. Empty:
  /// at the end of backward. A delayed gradient that is ready later still is an error that names both.
  std::string param_to_hook_all_reduce = {};
};

/// Makes the optimizer of one parameter: see DistributedDataParallel::apply_optimizer_in_backward.
using OptimizerFactory =
    std::function<std::shared_ptr<torch::optim::Optimizer>(const std::string& name, const torch::Tensor& parameter)>;

namespace detail {
class Reducer;  // src/train/ddp/reducer.h
}

/// While it lives, backward does not communicate: gradients add up on each rank, and the first backward after it
/// averages the sum.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(std::shared_ptr<detail::Reducer> reducer);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<detail::Reducer> reducer_;
};

/// Tensors and their names.
using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// What DistributedDataParallel does, for tensors that belong to no module:
///
///   maniple::GradientAverager ddp({{"weight", weight}, {"bias", bias}}, {{"running_mean", mean}});
///   loss_of(weight, bias, mean).backward();                  // the gradients of weight and bias are averaged
///
/// Parameters are leaves of the graph; those that require no gradient are only copied from rank 0 at construction. The
/// same names, in the same order, on all ranks.
class GradientAverager {
 public:
  /// Collective over the group.
  explicit GradientAverager(NamedTensors parameters, NamedTensors buffers = {}, DdpOptions options = {});
  virtual ~GradientAverager();
  GradientAverager(GradientAverager&&) noexcept;
  GradientAverager& operator=(GradientAverager&&) noexcept;

  /// See NoSync: `{ auto guard = ddp.no_sync(); loss.backward(); }`. May be nested.
  NoSync no_sync();

  /// The weight of this rank's gradient in the following backwards, with Average::samples: normally the number of
  /// samples of its batch. Not negative; the sum over ranks must not be zero. Stays until set again.
  void set_weight(double weight);

  /// What happens to a bucket instead of the plain average; see comm_hooks.h. The same on all ranks; before the first
  /// backward.
  void register_comm_hook(CommHook hook);

  /// The optimizer's step becomes a part of backward: as soon as a bucket is averaged, its parameters take their step,
  /// while backward still works on the others (with Overlap::thread in the group's thread). When backward returns all
  /// have taken it; the program calls no step(). `make` is called for each parameter, here and now, so that parameters
  /// may have options of their own:
  ///
  ///   ddp.apply_optimizer_in_backward([](const std::string& name, const torch::Tensor& parameter) {
  ///     return std::make_shared<torch::optim::AdamW>(std::vector{parameter}, torch::optim::AdamWOptions(1e-3));
  ///   });
  ///
  /// The result is, bit for bit, that of one optimizer over all parameters after backward. Gradients stay as they are
  /// after the step: zero them as always. Under no_sync nothing is stepped; the synchronised backward that follows
  /// steps with the average of all that was accumulated. Several synchronised backwards are several steps. With
  /// find_unused_parameters the steps are taken at the end of backward, when it is known who was used. Any optimizer
  /// whose step() needs no closure (LBFGS does). Before the first backward, once; the same on all ranks. A backward
  /// that fails may leave some parameters stepped and others not: go back to a checkpoint.
  void apply_optimizer_in_backward(const OptimizerFactory& make);
  /// Those optimizers, in the order of the module's parameters that require a gradient: for learning rates and
  /// checkpoints. Empty if there are none.
  std::vector<std::shared_ptr<torch::optim::Optimizer>> optimizers() const;

  /// Sizes and times. Communicates nothing.
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

/// The face for modules, of any class.
class DdpBase : public ModuleWrapper, public GradientAverager {
 public:
  DdpBase(const std::shared_ptr<torch::nn::Module>& module, DdpOptions options);
  ~DdpBase() override;
  DdpBase(DdpBase&&) noexcept;
  DdpBase& operator=(DdpBase&&) noexcept;

  /// Loads the wrapped module. Every rank loads the same archive: nothing is communicated.
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace detail

/// `Net` is a module class or a holder made with TORCH_MODULE; `maniple::DistributedDataParallel ddp(net)` finds it
/// out.
template <class Net>
class DistributedDataParallel : public detail::DdpBase {
 public:
  using Module = typename detail::ModuleOf<Net>::type;

  /// Collective over the group.
  explicit DistributedDataParallel(std::shared_ptr<Module> module, DdpOptions options = {})
      : DdpBase(module, std::move(options)), module_(std::move(module)) {}
  explicit DistributedDataParallel(const torch::nn::ModuleHolder<Module>& holder, DdpOptions options = {})
      : DistributedDataParallel(holder.ptr(), std::move(options)) {}

  /// The wrapped module's forward. Never communicates. Throws InvalidArgument if a parameter was converted to another
  /// dtype or device since construction (LibTorch drops the hooks of such a parameter), or if there are others now.
  template <class... Arguments>
  decltype(auto) forward(Arguments&&... arguments) const {
    require_unchanged();
    return module_->forward(std::forward<Arguments>(arguments)...);
  }
  template <class... Arguments>
  decltype(auto) operator()(Arguments&&... arguments) const {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// Itself, so that it is used as a holder is: ddp->forward(x), ddp->train(), ddp->parameters().
  const DistributedDataParallel* operator->() const noexcept { return this; }
  DistributedDataParallel* operator->() noexcept { return this; }
  const std::shared_ptr<Module>& module() const noexcept { return module_; }  ///< the wrapped module

 private:
  std::shared_ptr<Module> module_;
};

/// A scripted model: made in C++, or loaded from a file that Python's torch.jit.script(...).save wrote.
///
///   maniple::DistributedDataParallel<torch::jit::Module> ddp(torch::jit::load("net.pt"));
///   ddp.train();
///   torch::optim::SGD optimizer(ddp.parameters(), 0.1);
///   torch::nll_loss(ddp(batch.data).toTensor(), batch.target).backward();
///
/// `ddp.module()` is the same model (copies of a torch::jit::Module share it): module().save("net.pt") saves it for
/// Python.
template <>
class DistributedDataParallel<torch::jit::Module> : public GradientAverager {
 public:
  using Module = torch::jit::Module;

  /// Collective over the group.
  explicit DistributedDataParallel(torch::jit::Module module, DdpOptions options = {});

  /// The model's forward. Never communicates. Throws as that of other modules does.
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
