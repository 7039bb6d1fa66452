// Fully sharded data parallelism (ZeRO-3, PyTorch's FSDP2). Each rank holds a part of the parameters, gradients and
// optimizer state, and processes its own part of the batch. A model is cut into *units*; the parameters of a unit are
// gathered only while it computes.
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
//   auto net = maniple::fully_shard([] { return Gpt(); });          // the root unit: everything outside other units
//   torch::optim::AdamW optimizer(net->parameters(), 3e-4);         // over this rank's shards
//   for (auto& batch : *loader) {
//     optimizer.zero_grad();
//     torch::cross_entropy_loss(net(batch.data), batch.target).backward();
//     maniple::clip_grad_norm_(*net, 1.0);
//     optimizer.step();
//   }
//
// Shards     Every parameter is divided along dimension 0, as by torch::chunk: 10 rows on 4 ranks become 3, 3, 3 and 1.
//            A rank may hold no rows of a small parameter. Outside forward and backward the parameters of the module
//            *are* these shards, so everything that works element by element works on them: all optimizers of
//            torch::optim except LBFGS, and all optimizers of optim.h.
// Forward    A unit's forward gathers its parameters, computes, and frees them. Without reshard_after_forward they stay
//            until backward (ZeRO-2).
// Backward   When backward reaches the unit's results, it gathers the parameters again. Once the unit's gradients are
//            complete it averages them over the ranks (reduce_scatter), and `grad` of a parameter becomes this rank's
//            part of the average. Then the gathered parameters are freed. At most three units are gathered at a time:
//            the root, the unit that computes, and the next one, which is gathered ahead (see `overlap`).
// Names      fully_shard returns a holder, FullySharded<Block>. Call it, register it, and put it into Sequential and
//            ModuleList like a Block. Parameters, buffers and children keep the names that they have in Block.
//            `unit->module()` is the Block.
// Memory     Pass a function that makes the module, instead of the module, and a large model is built unit by unit
//            without ever being whole. Every rank makes each unit and receives rank 0's values. Modules on the meta
//            device are rejected.
//
// Units. A unit is any module with a forward. forward may take any arguments; its result is a tensor, or holds tensors
// as described in tensor_nest.h. Tensors that need a gradient enter as arguments and leave as results; a unit does not
// return its own parameters. The module may keep other tensors, such as an auxiliary loss, and all ranks may go back
// from them. Only the thread that calls forward computes with the parameters. Units may contain units. A unit may be
// called several times before backward, in eval(), without grad mode, and inside maniple::checkpoint. Parameters may
// have any strides (they become contiguous) and any floating-point dtype. They may be frozen before fully_shard, or
// later, on all ranks, between a backward and the next forward. A parameter unused by all ranks in a backward keeps its
// gradient unchanged (an undefined gradient stays undefined); a parameter unused by some ranks counts as zero there. A
// parameter shared by two units is rejected: put both users into one unit, or leave both in the root.
//
// Contract. All ranks call the same units in the same order, in forward and in backward. The next gather detects a
// difference and names it. Not supported, and reported as errors: create_graph, to() and clone() after fully_shard,
// torch::save of a unit or of a module that contains units (see Checkpoint below). torch::save of parameters() is not
// detected, and saves only this rank's rows.
//
// Mixed precision. Parameters are gathered in MixedPrecision::param_dtype, and the unit computes in it. Shards and
// optimizer steps stay float32.
//
// Accumulation. Several backwards add to `grad`. Inside `auto guard = net->no_sync();`, which all ranks enter alike,
// nothing is communicated: each rank accumulates full gradients, and needs the memory for them, until the first
// backward of the same model outside. Until then `grad` is this rank's rows of its own sum. zero_grad() of any kind
// discards the sum; other changes to `grad` are an error.
//
// Hybrid (HSDP). `group` holds the ranks that divide a model, `replicate_group` the ranks that hold the same part:
// mesh["shard"], mesh["replica"].
//
// Checkpoint. With CheckpointOptions::sharded, Checkpoint saves and loads the module and the optimizer under the same
// names as in any other layout. full_parameters() gathers all parameters. unshard() gathers one unit, to call its
// functions other than forward.
//
// Errors. If a unit's forward throws, or a backward does, the gathered parameters are freed and the group is aborted:
// the other ranks, which wait for this one, get Aborted. A killed rank is reported as PeerLost.
//
// Threads: one thread at a time.
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

/// Like FSDP2's MixedPrecisionPolicy. Integer tensors are never converted.
struct MixedPrecision {
  std::optional<torch::ScalarType> param_dtype = {};   ///< dtype in which parameters are gathered and computed with
  std::optional<torch::ScalarType> reduce_dtype = {};  ///< dtype in which gradients are averaged; default: param_dtype
  std::optional<torch::ScalarType> output_dtype = {};  ///< dtype of forward's results; default: not converted
  bool cast_forward_inputs = true;                     ///< with param_dtype: also convert the arguments of forward
};

struct FullyShardOptions {
  /// The ranks that divide the parameters. Null: the default group.
  std::shared_ptr<ProcessGroup> group = nullptr;
  /// The ranks that hold the same shards; gradients are averaged over them, too. Null: none.
  std::shared_ptr<ProcessGroup> replicate_group = nullptr;
  /// False: parameters stay gathered between forward and backward. Default: true, except for a unit that contains
  /// units, because its backward begins right after its forward.
  std::optional<bool> reshard_after_forward = {};
  MixedPrecision mixed_precision = {};
  /// `thread`: gathers the next unit and averages gradients while a unit computes; costs the memory of one more unit.
  /// `none`: communicates when the result is needed. `automatic`: decides as DistributedDataParallel does. `inline_` is
  /// rejected. On a GPU communication always runs on a separate stream.
  Overlap overlap = Overlap::automatic;
  /// Copy rank 0's parameters and buffers to all ranks. Off: the caller guarantees that they are equal.
  bool init_sync = true;
};

namespace detail {
class ShardUnit;  // src/train/fully_sharded/unit.h
struct CallNode;  // a forward call's node in autograd's graph
class FullyShardedBase;

/// One call of a unit's forward: gathers at the start, frees at the end. Destroyed without finish(), it assumes that
/// forward threw, and aborts the group.
class UnitForward {
 public:
  explicit UnitForward(std::shared_ptr<ShardUnit> unit);
  ~UnitForward();
  UnitForward(const UnitForward&) = delete;
  UnitForward& operator=(const UnitForward&) = delete;

  /// Whether arguments must be replaced; inputs() returns the replacements.
  bool changes_inputs() const noexcept;
  std::vector<torch::Tensor> inputs(std::vector<torch::Tensor> tensors);
  /// The tensors of the result, as the caller receives them.
  std::vector<torch::Tensor> finish(std::vector<torch::Tensor> tensors);

 private:
  std::shared_ptr<ShardUnit> unit_;
  std::unique_ptr<CallNode> node_;
  bool graph_ = false;
  bool finished_ = false;
};

}  // namespace detail

/// While it exists, backward of these units does not average: see no_sync() of FullySharded.
class [[nodiscard]] UnitsNoSync {
 public:
  explicit UnitsNoSync(std::vector<std::shared_ptr<detail::ShardUnit>> units);
  ~UnitsNoSync();
  UnitsNoSync(UnitsNoSync&&) noexcept = default;
  UnitsNoSync& operator=(UnitsNoSync&&) = delete;

 private:
  std::vector<std::shared_ptr<detail::ShardUnit>> units_;
};

/// While it exists, the parameters of these units stay gathered: see unshard() of FullySharded.
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

/// A unit with a module of any class. Its parameters, buffers and children are the module's, under the same names.
class FullyShardedBase : public torch::nn::Module, public ShardedModule {
 public:
  ~FullyShardedBase() override;

  /// For this unit and all units inside it: `{ auto guard = net->no_sync(); loss.backward(); }`. May be nested.
  UnitsNoSync no_sync();
  /// Gathers the parameters of this unit and of all units inside it, to read them or to call functions of the module
  /// other than forward, without autograd. Do not write to them, and do not step an optimizer: the writes are lost, and
  /// the next gather throws InvalidArgument. Collective.
  Unsharded unshard();

  std::optional<TensorShard> shard_of(const std::string& parameter) const override;
  /// The parameters of this unit and the units inside it that require a gradient, each once.
  std::vector<torch::Tensor> trained_parameters() const;

  void train(bool on = true) override;
  bool is_training() const noexcept override;
  /// Throws InvalidArgument if anything would change: convert and move a module before fully_shard.
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

/// Adds the class of the module, but not yet the declaration of its forward.
template <class M>
class FullyShardedCall : public FullyShardedBase {
 public:
  /// For reading. Outside this unit's forward the module's parameters are this rank's rows, so only the unit may call
  /// the module; therefore const.
  std::shared_ptr<const M> module() const noexcept { return module_; }
  /// For calling functions other than forward, while the guard of this unit or of an enclosing one exists.
  const std::shared_ptr<M>& module(const Unsharded&) const noexcept { return module_; }

  /// The module's forward, including its default arguments.
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

/// The module class behind FullySharded. The constructor, called by fully_shard, is collective over the groups of the
/// options. forward is declared as in the module, so that Sequential and AnyModule can read its type; if the module's
/// forward is a template or overloaded, it is a template.
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

/// The holder of a unit, like the holders made by TORCH_MODULE. `Net` is a module class or such a holder.
template <class Net>
class FullySharded : public torch::nn::ModuleHolder<FullyShardedImpl<typename detail::ModuleOf<Net>::type>> {
 public:
  using Module = typename detail::ModuleOf<Net>::type;
  using Holder = torch::nn::ModuleHolder<FullyShardedImpl<Module>>;
  FullySharded(std::nullptr_t) : Holder(nullptr) {}  // NOLINT: as in TORCH_MODULE
  FullySharded(std::shared_ptr<FullyShardedImpl<Module>> unit) : Holder(std::move(unit)) {}  // NOLINT

  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return this->get()->call(std::forward<Arguments>(arguments)...);
  }
};

/// Turns a module into a unit: see above. Collective over the groups of the options. All ranks pass equal modules and
/// options; otherwise all ranks throw InvalidArgument, which names the difference. Throws InvalidArgument for
/// parameters that belong to another unit or are on the meta device.
template <class M>
FullySharded<M> fully_shard(std::shared_ptr<M> module, FullyShardOptions options = {}) {
  return FullySharded<M>(std::make_shared<FullyShardedImpl<M>>(std::move(module), std::move(options)));
}
template <class Net>
  requires torch::detail::is_module_holder<Net>::value
FullySharded<Net> fully_shard(const Net& module, FullyShardOptions options = {}) {
  return FullySharded<Net>(fully_shard(module.ptr(), std::move(options)).ptr());
}
/// The same, for the module returned by `make`: a holder or a std::shared_ptr.
template <class Make>
  requires(!torch::detail::is_module_holder<std::decay_t<Make>>::value && std::invocable<Make>)
auto fully_shard(Make&& make, FullyShardOptions options = {}) {
  return fully_shard(make(), std::move(options));
}

/// Memory of a fully sharded module on this rank, in bytes, and its communication.
struct FullyShardedSummary {
  struct Unit {
    std::string name;                ///< of the module ("layers.2"); empty for the root
    std::uint64_t parameters = 0;    ///< elements, summed over all ranks
    std::uint64_t whole_bytes = 0;   ///< gathered parameters, in param_dtype
    std::uint64_t shard_bytes = 0;   ///< this rank's shards
    std::uint64_t reduce_bytes = 0;  ///< full gradients, in the dtype in which they are averaged
    bool reshards = true;            ///< frees the parameters after forward
  };
  int ranks = 1;
  std::string overlap;  ///< "none" or "thread"
  std::vector<Unit> units;
  std::uint64_t parameter_bytes = 0;       ///< shards of all units
  std::uint64_t gradient_bytes = 0;        ///< for parameters that require a gradient
  std::uint64_t gathered_bytes = 0;        ///< maximum of parameters gathered at the same time
  std::uint64_t scratch_bytes = 0;         ///< communication buffers
  std::uint64_t whole_gradient_bytes = 0;  ///< full gradients of the largest unit, before averaging
  std::uint64_t received_bytes = 0;        ///< per step with one forward and one backward
  std::uint64_t sent_bytes = 0;

  /// The sum, plus `states` float32 numbers of optimizer state for each parameter (AdamW: 2).
  std::uint64_t peak_bytes(int states = 2) const noexcept;
  std::string text() const;
};
FullyShardedSummary fully_sharded_summary(torch::nn::Module& module);

}  // namespace maniple
