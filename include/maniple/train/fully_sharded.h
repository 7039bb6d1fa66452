// Fully sharded data parallelism (ZeRO-3, PyTorch's FSDP2): each rank holds a part of the parameters, of the gradients
// and of the optimizer's state, and works on its own part of the batch. A model is cut into *units*; a unit's
// parameters are whole only while it computes.
//
//   struct GptImpl : torch::nn::Module {
//     GptImpl() {
//       // a unit each
//       for (int i = 0; i < 12; ++i) blocks->push_back(maniple::fully_shard([] { return Block(768); }));
//     }
//     torch::Tensor forward(torch::Tensor x) { return head(blocks->forward(embed(x))); }
//     ...
//   };
//   TORCH_MODULE(Gpt);
//
//   auto net = maniple::fully_shard([] { return Gpt(); });          // the root: a unit of what belongs to no other
//   torch::optim::AdamW optimizer(net->parameters(), 3e-4);         // of this rank's parts
//   for (auto& batch : *loader) {
//     optimizer.zero_grad();
//     torch::cross_entropy_loss(net(batch.data), batch.target).backward();
//     maniple::clip_grad_norm_(*net, 1.0);
//     optimizer.step();
//   }
//
// Shards     Every parameter is divided along dimension 0, as torch::chunk does it: of 10 rows on 4 ranks, ranks hold
//            3, 3, 3 and 1. A rank may hold none of a small one. Outside of forward and backward the parameters of the
//            module *are* these shards: whatever works element by element (all optimizers of torch::optim but LBFGS,
//            those of optim.h but Lamb-like norms) works on them.
// Forward    of a unit gathers its parameters, computes, and frees them (reshard_after_forward; off: they stay until
//            backward, ZeRO-2).
// Backward   gathers them again when it reaches the results of a unit, and when their gradients are complete averages
//            these over the ranks (reduce_scatter): `grad` of a parameter is this rank's part of the average. Then the
//            unit is free again. So at most the root, the unit that computes and the next one are whole, which is
//            gathered ahead (see `overlap`).
// Names      fully_shard returns a holder, FullySharded<Block>, that is called, registered, and put into Sequential and
//            ModuleList as Block is. Its parameters, buffers and children have the names that they have in Block.
//            `unit->module()` is the Block.
// Never      whole: a function that makes the module, rather than the module, lets a large model come into being one
//            unit after the other. Every rank makes each unit, and takes rank 0's values. (Modules on the meta device
//            are refused.)
//
// What a unit may be. Any module with a forward: any arguments, results that are a tensor or hold tensors as
// tensor_nest.h knows them. Tensors that need a gradient come in as arguments and leave as results; a unit does not
// return its own parameters. Units may contain units. One that is called several times before backward, in eval() and
// without grad mode, or inside maniple::checkpoint works as ever. Parameters may be frozen, before fully_shard or later
// (on all ranks, between a backward and the next forward). They may have any strides (they become contiguous) and any
// floating-point dtype. A parameter that no rank used in a backward keeps its gradient as it was (none stays none); one
// that some ranks did not use counts as zero there. A parameter that two units share is refused: put both of its users
// into one unit (or into none but the root).
//
// Contract: all ranks call the same units in the same order, in forward and backward. A difference is found by the next
// gather, and named. Not supported, with an error that says so: create_graph, to() and clone() after fully_shard,
// torch::save of a unit or of a module with units in it (see Checkpoint below). torch::save of parameters() is not
// noticed, and saves this rank's rows alone.
//
// Mixed precision: MixedPrecision::param_dtype is what is gathered and computed in; shards, and the optimizer's steps,
// stay float32. Accumulation: several backwards add to `grad`. Inside `auto guard = net->no_sync();`, which all ranks
// make alike, whole gradients add up on each rank and nothing is communicated, at the price of their memory, until the
// first backward of the same model outside. Meanwhile `grad` is this rank's rows of its own sum: zero_grad() of any
// kind discards the sum, and other changes to `grad` are an error. Hybrid (HSDP): `group` is the ranks that divide a
// model, `replicate_group` those that hold the same part: mesh["shard"], mesh["replica"].
//
// Checkpoint with CheckpointOptions::sharded saves and loads module and optimizer as those of any other layout, under
// the same names. full_parameters() gathers everything; unshard() makes one unit whole, to call other functions of it
// than forward.
//
// Errors. A unit whose forward throws, or a backward that does, frees what it gathered and aborts the group: the other
// ranks, which wait for it, get Aborted. A killed rank is PeerLost. One thread at a time.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
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
#include <maniple/train/clip_grad.h>
#include <maniple/train/ddp.h>
#include <maniple/train/sharded_checkpoint.h>
#include <maniple/train/tensor_layout.h>
#include <maniple/train/tensor_nest.h>

namespace MANIPLE_API maniple {

/// As FSDP2's MixedPrecisionPolicy. Integers are never converted.
struct MixedPrecision {
  std::optional<torch::ScalarType> param_dtype = {};   ///< parameters are gathered, and computed with, in this one
  std::optional<torch::ScalarType> reduce_dtype = {};  ///< gradients are averaged in it; default: param_dtype
  std::optional<torch::ScalarType> output_dtype = {};  ///< of what forward returns; default: as it comes
  bool cast_forward_inputs = true;                     ///< with param_dtype: arguments of forward become it, too
};

struct FullyShardOptions {
  /// The ranks that divide the parameters. Null: the default group.
  std::shared_ptr<ProcessGroup> group = nullptr;
  /// The ranks that hold the same part, over which gradients are averaged, too. Null: none.
  std::shared_ptr<ProcessGroup> replicate_group = nullptr;
  /// False: parameters stay whole between forward and backward. Default: true, but false for a unit that contains
  /// others, whose backward begins right after its forward.
  std::optional<bool> reshard_after_forward = {};
  MixedPrecision mixed_precision = {};
  /// `thread`: the next unit is gathered, and gradients are averaged, while this one computes; costs one more unit's
  /// memory. `none`: when they are needed. `automatic`: as DistributedDataParallel decides it. `inline_` is refused. On
  /// a GPU communication always runs on a stream of its own.
  Overlap overlap = Overlap::automatic;
  /// Rank 0's parameters and buffers become those of all ranks. Off: the caller vouches that they are equal.
  bool init_sync = true;
};

namespace detail {
class ShardUnit;  // src/train/fully_sharded/unit.h
struct CallNode;  // a forward call's part in autograd's graph
class FullyShardedBase;

/// One call of a unit's forward: gathers, and frees at its end. If it is not finished, forward has thrown: the group is
/// aborted.
class UnitForward {
 public:
  explicit UnitForward(std::shared_ptr<ShardUnit> unit);
  ~UnitForward();
  UnitForward(const UnitForward&) = delete;
  UnitForward& operator=(const UnitForward&) = delete;

  /// Whether arguments have to be replaced at all; and those that take their place.
  bool changes_inputs() const noexcept;
  std::vector<torch::Tensor> inputs(std::vector<torch::Tensor> tensors);
  /// The tensors of the result, as the caller gets them.
  std::vector<torch::Tensor> finish(std::vector<torch::Tensor> tensors);

 private:
  std::shared_ptr<ShardUnit> unit_;
  std::unique_ptr<CallNode> node_;
  bool graph_ = false;
  bool finished_ = false;
};

}  // namespace detail

/// While it lives, backward of some units averages nothing: see FullySharded's no_sync().
class [[nodiscard]] UnitsNoSync {
 public:
  explicit UnitsNoSync(std::vector<std::shared_ptr<detail::ShardUnit>> units);
  ~UnitsNoSync();
  UnitsNoSync(UnitsNoSync&&) noexcept = default;
  UnitsNoSync& operator=(UnitsNoSync&&) = delete;

 private:
  std::vector<std::shared_ptr<detail::ShardUnit>> units_;
};

/// While it lives, the parameters of a unit are whole: see FullySharded's unshard().
class [[nodiscard]] Unsharded {
 public:
  explicit Unsharded(std::vector<std::shared_ptr<detail::ShardUnit>> units);
  ~Unsharded();
  Unsharded(Unsharded&&) noexcept = default;
  Unsharded& operator=(Unsharded&&) = delete;

 private:
  std::vector<std::shared_ptr<detail::ShardUnit>> units_;
};

namespace detail {

/// What a unit is for every kind of module. Its parameters, buffers and children are those of the module, under the
/// same names.
class FullyShardedBase : public torch::nn::Module, public ShardedModule {
 public:
  ~FullyShardedBase() override;

  /// Of this unit and those inside it: `{ auto guard = net->no_sync(); loss.backward(); }`. May be nested.
  UnitsNoSync no_sync();
  /// Makes this unit's parameters whole, and the parameters of units inside it: to read them, or to call other
  /// functions of the module than forward, without autograd. Do not write to them, nor let an optimizer step: the
  /// writes are lost, and the next gather throws InvalidArgument. Collective.
  Unsharded unshard();

  std::optional<TensorShard> shard_of(const std::string& parameter) const override;
  /// The parameters that require a gradient, of this unit and those inside it, each once.
  std::vector<torch::Tensor> trained_parameters() const;

  void train(bool on = true) override;
  bool is_training() const noexcept override;
  /// Throws InvalidArgument unless nothing would change: convert and move a module before fully_shard.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
  std::shared_ptr<torch::nn::Module> clone(
      const TorchOptional<torch::Device>& device = {}) const override;  ///< throws Unsupported
  void save(torch::serialize::OutputArchive& archive) const override;   ///< throws Unsupported: use Checkpoint
  void load(torch::serialize::InputArchive& archive) override;          ///< throws Unsupported: use Checkpoint

  const std::shared_ptr<ShardUnit>& unit() const noexcept { return unit_; }  ///< internal

 protected:
  FullyShardedBase(std::shared_ptr<torch::nn::Module> module, FullyShardOptions options);

 private:
  std::shared_ptr<torch::nn::Module> whole_;
  std::shared_ptr<ShardUnit> unit_;
};

/// The part that knows the class of the module, but not yet how its forward is declared.
template <class M>
class FullyShardedCall : public FullyShardedBase {
 public:
  /// To look at. Outside of this unit's forward its parameters are this rank's rows, so only the unit may call the
  /// module: hence const.
  std::shared_ptr<const M> module() const noexcept { return module_; }
  /// To call other functions of it than forward, while the guard of this unit or of one around it lives.
  const std::shared_ptr<M>& module(const Unsharded&) const noexcept { return module_; }

  /// The module's forward, with its default arguments.
  template <class... Arguments>
  auto call(Arguments&&... arguments) {
    using Result = std::decay_t<decltype(module_->forward(std::forward<Arguments>(arguments)...))>;
    UnitForward forward(unit());
    const auto run = [&]() -> decltype(auto) {
      if constexpr ((std::is_copy_constructible_v<std::decay_t<Arguments>> && ...)) {
        if (forward.changes_inputs()) {
          std::tuple<std::decay_t<Arguments>...> values(replaced(forward, arguments)...);
          return std::apply(
              [&](auto&... value) -> Result { return module_->forward(std::forward<Arguments>(value)...); }, values);
        }
      }
      return static_cast<Result>(module_->forward(std::forward<Arguments>(arguments)...));
    };
    if constexpr (std::is_void_v<Result>) {
      run();
      forward.finish({});
    } else if constexpr (!std::is_copy_constructible_v<Result>) {
      Result result = run();
      forward.finish({});
      return result;
    } else {
      const Result result = run();
      return with_tensors(result, forward.finish(tensors_in(result)));
    }
  }

 protected:
  FullyShardedCall(std::shared_ptr<M> module, FullyShardOptions options)
      : FullyShardedBase(module, std::move(options)), module_(std::move(module)) {}

 private:
  template <class T>
  static T replaced(UnitForward& forward, const T& argument) {
    std::vector<torch::Tensor> tensors = tensors_in(argument);
    if (tensors.empty()) return argument;
    return with_tensors(argument, forward.inputs(std::move(tensors)));
  }

  std::shared_ptr<M> module_;
};

template <class C, class R, class... A>
std::type_identity<R(A...)> signature(R (C::*)(A...));
template <class C, class R, class... A>
std::type_identity<R(A...)> signature(R (C::*)(A...) const);
template <class M>
struct ForwardSignature {
  using type = void;
};
template <class M>
  requires requires { signature(&M::forward); }
struct ForwardSignature<M> {
  using type = typename decltype(signature(&M::forward))::type;
};

}  // namespace detail

/// The module class behind a FullySharded. Its constructor, which is what fully_shard does, is collective over the
/// groups of the options. forward is declared as the module's is, so that Sequential and AnyModule can read its type;
/// it is a template where that is one, or overloaded.
template <class M, class Signature = typename detail::ForwardSignature<M>::type>
class FullyShardedImpl : public detail::FullyShardedCall<M> {
 public:
  explicit FullyShardedImpl(std::shared_ptr<M> module, FullyShardOptions options = {})
      : detail::FullyShardedCall<M>(std::move(module), std::move(options)) {}
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    return this->call(std::forward<Arguments>(arguments)...);
  }
};
template <class M, class Result, class... Arguments>
class FullyShardedImpl<M, Result(Arguments...)> : public detail::FullyShardedCall<M> {
 public:
  explicit FullyShardedImpl(std::shared_ptr<M> module, FullyShardOptions options = {})
      : detail::FullyShardedCall<M>(std::move(module), std::move(options)) {}
  std::decay_t<Result> forward(Arguments... arguments) { return this->call(std::forward<Arguments>(arguments)...); }
};

/// A holder of a unit, as those made with TORCH_MODULE. `Net` is a module class or such a holder.
template <class Net>
class FullySharded : public torch::nn::ModuleHolder<FullyShardedImpl<typename detail::ModuleOf<Net>::type>> {
 public:
  using Module = typename detail::ModuleOf<Net>::type;
  using Holder = torch::nn::ModuleHolder<FullyShardedImpl<Module>>;
  FullySharded(std::nullptr_t) : Holder(nullptr) {}  // NOLINT: as TORCH_MODULE's
  FullySharded(std::shared_ptr<FullyShardedImpl<Module>> unit) : Holder(std::move(unit)) {}  // NOLINT

  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return this->get()->call(std::forward<Arguments>(arguments)...);
  }
};

/// Makes a module a unit: see above. Collective over the groups of the options: all ranks give equal modules and
/// options, or all get InvalidArgument naming the difference. Throws InvalidArgument for parameters of another unit and
/// those on the meta device.
template <class M>
FullySharded<M> fully_shard(std::shared_ptr<M> module, FullyShardOptions options = {}) {
  return FullySharded<M>(std::make_shared<FullyShardedImpl<M>>(std::move(module), std::move(options)));
}
template <class Net>
  requires torch::detail::is_module_holder<Net>::value
FullySharded<Net> fully_shard(const Net& module, FullyShardOptions options = {}) {
  return FullySharded<Net>(fully_shard(module.ptr(), std::move(options)).ptr());
}
/// The same of a module that `make` makes: a holder or a std::shared_ptr.
template <class Make>
  requires(!torch::detail::is_module_holder<std::decay_t<Make>>::value && std::invocable<Make>)
auto fully_shard(Make&& make, FullyShardOptions options = {}) {
  return fully_shard(make(), std::move(options));
}

/// What a fully sharded module takes on this rank, in bytes, and what it communicates.
struct FullyShardedSummary {
  struct Unit {
    std::string name;                ///< of the module ("layers.2"), empty for the root
    std::uint64_t parameters = 0;    ///< elements, of all ranks
    std::uint64_t whole_bytes = 0;   ///< of them as they are gathered
    std::uint64_t shard_bytes = 0;   ///< on this rank
    std::uint64_t reduce_bytes = 0;  ///< of the gradients as they are averaged, whole
    bool reshards = true;            ///< after forward
  };
  int ranks = 1;
  std::string overlap;  ///< "none" or "thread"
  std::vector<Unit> units;
  std::uint64_t parameter_bytes = 0;       ///< shards of all units
  std::uint64_t gradient_bytes = 0;        ///< of those that require one
  std::uint64_t gathered_bytes = 0;        ///< parameters that are whole at the same time, at most
  std::uint64_t scratch_bytes = 0;         ///< of communication
  std::uint64_t whole_gradient_bytes = 0;  ///< of the largest unit, before they are averaged
  std::uint64_t received_bytes = 0;        ///< in a step, with one forward and one backward
  std::uint64_t sent_bytes = 0;

  /// All of it, and `states` numbers in float32 of the optimizer for each parameter (AdamW: 2).
  std::uint64_t peak_bytes(int states = 2) const noexcept;
  std::string text() const;
};
FullyShardedSummary fully_sharded_summary(torch::nn::Module& module);

}  // namespace maniple
