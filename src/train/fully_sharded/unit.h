// A unit of a fully sharded model: its sharded and gathered parameters, and the transitions between them.
//
// A parameter is one tensor object, which modules, optimizer and program hold. Its data is this rank's rows
// (*concealed*) or, while its unit computes, all rows (*exposed*); set_data switches between the two. The whole
// parameters of a unit are views of one LibTorch storage. finish_gather() allocates its memory if there is none, and
// free_unused() frees it. Tensors that autograd saved in forward are views of that storage, too: they become valid
// again when backward has gathered the unit.
//
// While exposed in forward, a parameter that requires a gradient is not a leaf: its grad_fn is this call's GatheredBy
// node, which receives the gradients of all parameters of the unit at once. `grad` always belongs to the shard.
//
//   forward    UnitForward: gather, expose, compute, conceal.           The results pass through a node, ResultsOf.
//   backward   ResultsOf:   gather, expose.  GatheredBy: average the gradients, conceal.
//
// A backward from a tensor that left forward in another way does not reach ResultsOf. The first node of the call that
// it reaches then gathers: see forward_calls.h.
//
// Exposing a concealed unit always gathers it, even if an older graph kept its whole parameters: their values are then
// refreshed in place. Only a backward through a graph that kept the whole parameters itself skips the gather, and only
// if no other backward has ended since, because an optimizer may have stepped after it. So a rank's collectives do not
// depend on which tensors its program keeps. The whole parameters are freed when the unit is concealed and no graph
// keeps them.
//
// Inside no_sync, gradients add up in `accumulated`, and the parameter's `grad` becomes a mark: this rank's rows of
// `accumulated`, or the gradient that was there before. If zero_grad() has zeroed or dropped the mark, the accumulated
// gradient is discarded.
//
// Frozen parameters may be needed after the gradients of the other parameters are complete. In a unit with frozen
// parameters, the arguments of forward therefore pass through a third node, ArgumentsOf, and the last of the two nodes
// conceals the unit. The end of a backward conceals every unit that is still exposed.
//
// Communication uses memory that all units of a group share, their *scratch*. A gather holds, for each rank, a header
// and the rank's rows of each parameter. A reduction holds, for each rank, a tag, one flag per parameter (set if a rank
// computed its gradient) and the rank's rows. The average of a flag shows whether any rank used the parameter; the
// average of the tags shows whether all ranks reduce the same unit.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/torch.h>

#include "train/fully_sharded/forward_calls.h"
#include "train/packed_layout.h"
#include "train/tensor/device.h"
#include "train/tensor/torch_compat.h"
#include <maniple/train/fully_sharded.h>

namespace maniple::detail {

struct ShardedParameter {
  std::vector<std::string> names;   ///< names in the module; several if it is registered several times
  torch::Tensor parameter;          ///< the tensor that modules, optimizer and program hold
  torch::Tensor shard;              ///< its data while concealed
  torch::Tensor whole;              ///< its data while exposed
  std::vector<std::int64_t> shape;  ///< shape of the whole parameter
  std::int64_t rows = 0;            ///< rows of the whole parameter; 1 for a scalar
  std::int64_t row_elements = 0;
  RowRange own;
  TensorShard layout;  ///< for checkpoints; `local` is empty

  // Gradients accumulated inside no_sync.
  torch::Tensor accumulated;  ///< the whole gradient on this rank; undefined if none
  torch::Tensor mark;         ///< `grad` as accumulate() left it
  std::uint32_t mark_version = 0;
  bool mark_is_ours = false;  ///< the parameter had no gradient before

  std::uint32_t exposed_version = 0;  ///< version of the parameter when it was exposed
  bool guarded = false;               ///< a hook refuses gradients while it is concealed
  const std::string& name() const { return names.front(); }
};

/// The device as the group names it.
inline Device device_for(torch::Device device) { return device.is_cpu() ? Device{} : Device::cuda(device.index()); }

class ShardContext;
class GatheredBy;

/// Identifies the units of one model: a unit and the units inside it have the same token. A backward averages the
/// waiting gradients of the families that it reaches.
struct UnitFamily {};

class ShardUnit : public std::enable_shared_from_this<ShardUnit> {
 public:
  /// Collective.
  static std::shared_ptr<ShardUnit> make(torch::nn::Module& module, const FullyShardOptions& options);
  ~ShardUnit();

  const FullyShardOptions& options() const noexcept { return options_; }
  const std::vector<ShardedParameter>& parameters() const noexcept { return parameters_; }
  const ShardedParameter* find(const std::string& name) const;
  int number() const noexcept { return number_; }
  std::string text() const;  ///< "unit 3 (LayerImpl)"
  bool reshards() const noexcept { return reshards_; }
  bool has_frozen() const;
  bool whole() const noexcept { return is_whole_; }
  /// Whether the tensor lies in the storage of the whole parameters.
  bool owns(const torch::Tensor& tensor) const;
  torch::Device device() const noexcept { return device_; }
  ShardContext& context() noexcept { return *context_; }
  ProcessGroup& group() noexcept { return *options_.group; }
  std::size_t whole_bytes() const noexcept { return whole_bytes_; }
  std::size_t gather_bytes() const noexcept { return gather_.bytes(); }
  std::size_t reduce_bytes()
      const;  ///< of all parameters that require a gradient; with several dtypes, of the largest one

  /// Makes the unit's parameters whole until conceal(); with a node, they become the node's outputs. Calls nest. The
  /// first call gathers, unless the graph of `node` kept the whole parameters (`kept`). Collective.
  void expose(const NodePointer<GatheredBy>& node, bool kept = false);
  /// The same without a gather: the whole parameters have memory, but undefined values.
  void expose_undefined(const NodePointer<GatheredBy>& node);
  void conceal();
  bool exposed() const noexcept { return exposures_ > 0; }
  /// Keeps the whole parameters in memory for a graph, until let_go().
  void keep() { ++graphs_; }
  void let_go();

  // gather.cpp. start_gather() returns at once where communication is asynchronous.
  void start_gather();
  void finish_gather();

  // gradients.cpp
  /// `gradients` has one entry for each parameter in `which`; an undefined entry means that the parameter was not used.
  void reduce(const std::vector<std::size_t>& which, std::vector<torch::Tensor> gradients);
  void accumulate(const std::vector<std::size_t>& which, std::vector<torch::Tensor> gradients);
  /// Averages the gradients that were accumulated on this rank or on others.
  void reduce_accumulated() { reduce(trained(), std::vector<torch::Tensor>(parameters_.size())); }
  /// Whether gradients are accumulated. Detects zero_grad() first.
  bool has_accumulated();
  /// The parameters that require a gradient.
  std::vector<std::size_t> trained() const;
  /// Waits for the average and adds it to `grad`.
  void finish_reduce();
  void forget_gradients() noexcept;

  std::shared_ptr<UnitFamily> family = std::make_shared<UnitFamily>();
  int unsynced = 0;      ///< live no_sync guards
  bool waiting = false;  ///< there was a no_sync guard since the last average: a rank may have accumulated gradients
  /// Aborts the group and throws `text`.
  [[noreturn]] void fail(const std::string& text);

 private:
  /// The layout in the scratch of the gradients of one dtype.
  struct ReduceLayout {
    torch::ScalarType dtype;
    std::vector<std::size_t> members;  ///< indices into parameters_
    PackedLayout packed;               ///< a part for each rank: the tag, the flags, and its rows of each member
  };

  ShardUnit(torch::nn::Module& module, const FullyShardOptions& options);
  void collect(torch::nn::Module& module);
  void require_same_on_all_ranks(const torch::nn::Module& module);
  void synchronize(torch::nn::Module& module);
  void shard();
  void lay_out_gather();
  void require_in_place() const;
  void allocate_whole();
  void free_unused() noexcept;
  void check_headers();
  std::int64_t frozen_hash() const;
  void guard_concealed(ShardedParameter& one) const;
  bool keeps_accumulated(ShardedParameter& one);
  void mark_accumulated(ShardedParameter& one);
  void drop_accumulated(ShardedParameter& one) noexcept;
  std::vector<ReduceLayout> reduce_layouts(const std::vector<std::size_t>& which) const;
  void start_reduce(const ReduceLayout& layout, const std::vector<torch::Tensor>& gradients);
  torch::ScalarType gathered_dtype(const torch::Tensor& parameter) const;
  torch::ScalarType reduced_dtype(const torch::Tensor& parameter) const;

  FullyShardOptions options_;
  std::shared_ptr<ShardContext> context_;
  std::string class_name_;
  int number_ = 0;
  bool reshards_ = true;
  bool contains_units_ = false;
  torch::Device device_{torch::kCPU};
  std::vector<ShardedParameter> parameters_;

  // The whole parameters.
  c10::Storage storage_;
  std::size_t whole_bytes_ = 0;
  bool is_whole_ = false;
  int exposures_ = 0, graphs_ = 0;  // users of the whole parameters
  std::string lost_write_;          // a parameter that was written while it was exposed

  // Gathering.
  PackedLayout gather_;            // in bytes; one part per rank: the header, then its rows of each parameter
  std::uint64_t checked_ = 0;      // gathers checked since the set of frozen parameters changed (GPU only)
  std::int64_t checked_hash_ = 0;  // hash of the set of frozen parameters

  // The reduction under way.
  std::vector<bool> used_here_;  // for each parameter
  std::optional<ReduceLayout> reducing_;
};

/// State shared by the units of one group: scratch memory, the order in which units are gathered, and the backward
/// under way.
class ShardContext : public std::enable_shared_from_this<ShardContext> {
 public:
  /// The context for the group of `options`; made if no unit uses that group yet. Collective.
  static std::shared_ptr<ShardContext> of(const FullyShardOptions& options);
  explicit ShardContext(const FullyShardOptions& options);
  ~ShardContext();

  int add(ShardUnit* unit);  ///< returns the unit's number
  void remove(ShardUnit* unit) noexcept;

  /// Communication memory of at least `bytes` bytes. Collective when it has to grow.
  enum class Use { gather, reduce };
  const RegisteredMemory& scratch(Use use, std::size_t bytes, torch::Device device);
  std::size_t scratch_bytes() const;
  bool asynchronous(torch::Device device) const noexcept { return overlaps_ || !device.is_cpu(); }
  bool overlaps() const noexcept { return overlaps_; }

  /// Starts an operation: in this thread, in the group's thread, or on the side stream.
  void start(Use use, torch::Device device, const std::function<Work(const CallOptions&)>& operation);
  /// Waits for the operation. On a GPU, makes later work on the current stream run after it.
  void wait(Use use, torch::Device device);
  /// Throws the error of the last operation. Blocks the host until that operation has ended.
  void require_good(Use use);

  /// Gathers a unit. Inside a pass (the forward of an outermost unit, or a backward) this also starts the gather of the
  /// unit that came next in the previous such pass. Nothing is gathered ahead across passes, because programs write
  /// parameters in between.
  void gather(ShardUnit& unit);
  void enter_forward();
  void leave_forward() noexcept;

  // A backward: context.cpp
  void enter_backward();
  bool in_backward() const noexcept { return running_; }
  std::uint64_t backwards() const noexcept { return backwards_; }  ///< backwards that have ended
  void note(const NodePointer<GatheredBy>& node);
  /// Makes the backward under way throw this error at its next chance: its hooks for single nodes cannot throw.
  void fail_backward(std::exception_ptr error) noexcept { failure_ = std::move(error); }
  void require_success() const {
    if (failure_) std::rethrow_exception(failure_);
  }
  /// The backward under way averages gradients of this family.
  void reached(const std::shared_ptr<UnitFamily>& family) { reached_.insert(family); }
  /// `unit` has started an average, which must be finished before the next one.
  void reducing(ShardUnit* unit) { reducing_ = unit; }
  void finish_reducing();
  void finish_backward();
  void abandon(const std::string& why) noexcept;
  void abort(const std::string& why) noexcept;

  std::recursive_mutex mutex;  ///< autograd has one thread per device

 private:
  struct Scratch {
    RegisteredMemory memory;
    std::size_t bytes = 0;
  };
  void end_pass() noexcept;
  void reduce_waiting();
  std::shared_ptr<ProcessGroup> group_, replicate_;
  bool overlaps_ = false;
  int next_number_ = 0;
  std::vector<ShardUnit*> units_;
  std::map<std::pair<Use, std::string>, Scratch> scratch_;
  std::map<Use, Work> work_;
  SideStream side_;  // destroyed before scratch_

  int forwards_ = 0;                                    // live UnitForwards
  ShardUnit* last_ = nullptr;                           // the unit gathered last in this pass
  std::unordered_map<ShardUnit*, ShardUnit*> next_[2];  // each unit's successor, in forward (0) or backward (1)
  ShardUnit* ahead_ = nullptr;                          // the unit whose gather was started ahead

  bool running_ = false;
  std::uint64_t backwards_ = 0;
  std::vector<WeakNodePointer<GatheredBy>> nodes_;
  std::set<std::shared_ptr<UnitFamily>> reached_;
  ShardUnit* reducing_ = nullptr;
  std::exception_ptr failure_;  // of the backward under way
};

// ---- Nodes of autograd's graph --------------------------------------------------------------------------------------

/// The source of a call's parameters in autograd's graph. In backward it receives their gradients.
class GatheredBy : public torch::autograd::Node {
 public:
  explicit GatheredBy(std::shared_ptr<ShardUnit> unit);
  ~GatheredBy() override;
  void release_resources();  // overrides where the base class has it
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

  /// enter(): backward has reached the results. arguments_done(): the gradients of one group of arguments are computed.
  /// leave(): backward no longer needs the unit. enter_early(): backward has reached a node of the forward, which is a
  /// result's unless a tensor left the forward in another way.
  void enter();
  void enter_early() noexcept;
  void arguments_done();
  void leave() noexcept;
  /// Keeps the whole parameters from forward to backward.
  void keep();

  std::shared_ptr<ShardUnit> unit;
  std::vector<std::size_t> trained;  ///< the parameters that are its outputs, in order
  int arguments = 0;                 ///< number of ArgumentsOf nodes
  std::shared_ptr<ForwardCall> forward;

 private:
  void let_go() noexcept;

  enum class Stage {
    outside,  // no backward is in this node
    entered,  // the unit is exposed
    reduced,  // the gradients of its parameters are being averaged, or accumulated
  } stage_ = Stage::outside;
  bool keeps_ = false;
  std::uint64_t kept_since_ = 0;             // backwards() at the time of keep()
  std::optional<std::uint64_t> entered_in_;  // backwards() at the time of enter()
  int arguments_left_ = 0;
};

}  // namespace maniple::detail
