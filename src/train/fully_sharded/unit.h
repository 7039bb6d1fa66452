// A unit of a fully sharded model: its parameters as shards and as wholes, and the way between them.
//
// A parameter is one tensor object, which modules, optimizer and program hold. Its data are the rows of this rank
// (*concealed*) or, while its unit computes, all rows (*exposed*): set_data moves it between the two. The wholes of a
// unit are views on one storage of LibTorch's, whose memory is taken by gather() and given back by free_whole().
// Tensors that autograd has saved in forward are views on that storage as well: they are valid again as soon as
// backward has gathered it.
//
// While it is exposed in forward, a parameter that requires a gradient is no leaf: its grad_fn is the node GatheredBy
// of this call, which receives the gradients of all parameters of the unit at once. `grad` stays that of the shard all
// the time.
//
//   forward    UnitForward: gather, expose, compute, conceal.           The results pass through a node, ResultsOf.
//   backward   ResultsOf:   gather, expose.  GatheredBy: average the gradients, conceal.
//
// Whoever exposes a concealed unit gathers it, even if an older graph kept its wholes: the values are then refreshed in
// place. Only a backward through a graph that has kept the wholes itself skips the gather, and only if no other
// backward came in between, after which an optimizer may have stepped. So the collectives of a rank do not depend on
// the tensors that its program keeps. The wholes are freed when the unit is concealed and no graph keeps them.
//
// Gradients of a backward inside no_sync add up in `accumulated`, and the parameter's `grad` becomes a mark: this
// rank's rows of `accumulated`, or the gradient that was there before. A mark that zero_grad() has zeroed or dropped
// discards what was added up.
//
// A unit with frozen parameters may need them longer than until the gradients of the others are complete: there,
// arguments of forward pass through a third node, ArgumentsOf, and the last of the two conceals. The end of a backward
// conceals what is still exposed.
//
// Communication goes through memory that all units of a group share, their *scratch*. Gathered bytes: for each rank a
// header and its rows of each parameter. Reduced: for each rank a tag, one flag for each parameter (a rank has computed
// its gradient) and its rows; the average of the flags tells which parameters were used on any rank, that of the tags
// whether all ranks reduce the same unit.
#pragma once

#include <cstdint>
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

#include "train/packed_layout.h"
#include "train/tensor/device.h"
#include "train/tensor/torch_compat.h"
#include <maniple/train/fully_sharded.h>

namespace maniple::detail {

struct ShardedParameter {
  std::vector<std::string> names;   ///< in the module; more than one where it is registered several times
  torch::Tensor parameter;          ///< the tensor that everybody holds
  torch::Tensor shard;              ///< its data, concealed
  torch::Tensor whole;              ///< its data, exposed
  std::vector<std::int64_t> shape;  ///< of the whole
  std::int64_t rows = 0;            ///< of the whole; of a scalar 1
  std::int64_t row_elements = 0;
  RowRange own;
  TensorShard layout;  ///< for checkpoints; `local` is empty

  // Gradients inside no_sync.
  torch::Tensor accumulated;  ///< the whole gradient on this rank; undefined: none
  torch::Tensor mark;         ///< `grad` as accumulate() left it
  std::uint32_t mark_version = 0;
  bool mark_is_ours = false;  ///< there was no gradient before

  std::uint32_t exposed_version = 0;  ///< of the parameter when it was exposed
  bool guarded = false;               ///< a hook refuses gradients while it is concealed
  const std::string& name() const { return names.front(); }
};

/// As the group sees it.
inline Device device_for(torch::Device device) { return device.is_cpu() ? Device{} : Device::cuda(device.index()); }

class ShardContext;
class GatheredBy;

/// Units of one model: a unit that contains others has the same token as they. A backward averages the waiting
/// gradients of the families that it reaches.
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
  /// Whether its memory is that of the wholes.
  bool owns(const torch::Tensor& tensor) const;
  torch::Device device() const noexcept { return device_; }
  ShardContext& context() noexcept { return *context_; }
  ProcessGroup& group() noexcept { return *options_.group; }
  std::size_t whole_bytes() const noexcept { return whole_bytes_; }
  std::size_t gather_bytes() const noexcept { return gather_.bytes(); }
  std::size_t reduce_bytes()
      const;  ///< of all parameters that require a gradient; the largest dtype's, if there are several

  /// The unit's parameters are whole until conceal(); with a node, they are its outputs. Calls nest. The first one
  /// gathers, unless the graph of `node` has kept the wholes. Collective.
  void expose(const NodePointer<GatheredBy>& node, bool kept = false);
  void conceal();
  bool exposed() const noexcept { return exposures_ > 0; }
  /// Keeps the wholes in memory for a graph.
  void keep() { ++graphs_; }
  void let_go();

  // gather.cpp. start_gather only begins, where communication is asynchronous.
  void start_gather();
  void finish_gather();

  // gradients.cpp
  /// One for each trained parameter of the node; undefined ones were not used.
  void reduce(const std::vector<std::size_t>& which, std::vector<torch::Tensor> gradients);
  void accumulate(const std::vector<std::size_t>& which, std::vector<torch::Tensor> gradients);
  /// Averages what was accumulated, on this rank or on others.
  void reduce_accumulated() { reduce(trained(), std::vector<torch::Tensor>(parameters_.size())); }
  /// Looks for zero_grad() first.
  bool has_accumulated();
  /// The parameters that require a gradient.
  std::vector<std::size_t> trained() const;
  /// Waits for the average, and adds it to `grad`.
  void finish_reduce();
  void forget_gradients() noexcept;

  std::shared_ptr<UnitFamily> family = std::make_shared<UnitFamily>();
  int unsynced = 0;      ///< guards of no_sync that live
  bool waiting = false;  ///< there was such a guard since the last average: a rank may have accumulated gradients
  /// The group is aborted, and `text` thrown.
  [[noreturn]] void fail(const std::string& text);

 private:
  /// How the gradients of some parameters lie in the scratch: those of one dtype.
  struct ReduceLayout {
    torch::ScalarType dtype;
    std::vector<std::size_t> members;  ///< of parameters_
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

  // The wholes.
  c10::Storage storage_;
  std::size_t whole_bytes_ = 0;
  bool is_whole_ = false;
  int exposures_ = 0, graphs_ = 0;  // who needs them
  std::string lost_write_;          // a parameter that was written while it was whole

  // Gathering.
  PackedLayout gather_;            // in bytes; a part for each rank: the header, and its rows of each parameter
  std::uint64_t checked_ = 0;      // headers, since the set of frozen parameters changed
  std::int64_t checked_hash_ = 0;  // of that set

  // The average under way.
  std::vector<bool> used_here_;  // by parameter
  std::optional<ReduceLayout> reducing_;
};

/// What the units of one group have in common: scratch memory, the order in which they are gathered, the backward under
/// way.
class ShardContext : public std::enable_shared_from_this<ShardContext> {
 public:
  /// That of the group of `options`; a new one, if no unit uses it yet. Collective.
  static std::shared_ptr<ShardContext> of(const FullyShardOptions& options);
  explicit ShardContext(const FullyShardOptions& options);
  ~ShardContext();

  int add(ShardUnit* unit);  ///< its number
  void remove(ShardUnit* unit) noexcept;

  /// Memory of communication, at least so many bytes. Collective when it has to grow.
  enum class Use { gather, reduce };
  const RegisteredMemory& scratch(Use use, std::size_t bytes, torch::Device device);
  std::size_t scratch_bytes() const;
  bool asynchronous(torch::Device device) const noexcept { return overlaps_ || !device.is_cpu(); }
  bool overlaps() const noexcept { return overlaps_; }

  /// Starts an operation: in this thread, in that of the group, or on the side stream.
  void start(Use use, torch::Device device, const std::function<Work(const CallOptions&)>& operation);
  /// Returns when it is complete; on a GPU, when what follows on the current stream comes after it.
  void wait(Use use, torch::Device device);
  /// Throws what went wrong in the last one. The host waits for it.
  void require_good(Use use);

  /// The wholes of a unit. Inside a pass (the forward of an outermost unit, or a backward) the gather of the unit that
  /// came next in the last such pass begins, too. Nothing is gathered ahead of another pass, as programs write
  /// parameters in between.
  void gather(ShardUnit& unit);
  void enter_forward();
  void leave_forward() noexcept;

  // A backward: context.cpp
  void enter_backward();
  bool in_backward() const noexcept { return running_; }
  std::uint64_t backwards() const noexcept { return backwards_; }  ///< that have ended
  void note(const NodePointer<GatheredBy>& node);
  /// The backward averages gradients of this family.
  void reached(const std::shared_ptr<UnitFamily>& family) { reached_.insert(family); }
  /// `unit` has started an average, which is to be finished before the next one.
  void reducing(ShardUnit* unit) { reducing_ = unit; }
  void finish_reducing();
  void finish_backward();
  void abandon(const std::string& why) noexcept;
  void abort(const std::string& why) noexcept;

  std::recursive_mutex mutex;  ///< autograd has a thread for each device

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
  SideStream side_;  // destroyed before the scratch

  int forwards_ = 0;                                    // UnitForwards that live
  ShardUnit* last_ = nullptr;                           // gathered last in this pass
  std::unordered_map<ShardUnit*, ShardUnit*> next_[2];  // which unit comes next, in forward (0) or backward (1)
  ShardUnit* ahead_ = nullptr;                          // its gather has begun

  bool running_ = false;
  std::uint64_t backwards_ = 0;
  std::vector<WeakNodePointer<GatheredBy>> nodes_;
  std::set<std::shared_ptr<UnitFamily>> reached_;
  ShardUnit* reducing_ = nullptr;
};

// ---- Nodes of autograd's graph --------------------------------------------------------------------------------------

/// Where the parameters of a call come from. In backward it gets their gradients.
class GatheredBy : public torch::autograd::Node {
 public:
  explicit GatheredBy(std::shared_ptr<ShardUnit> unit);
  ~GatheredBy() override;
  void release_resources();  // overrides where there is something to override
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

  /// Backward has reached the results, and has done with the arguments' gradients or with all.
  void enter();
  void arguments_done();
  void leave() noexcept;
  /// Keeps the wholes from forward to backward.
  void keep();

  std::shared_ptr<ShardUnit> unit;
  std::vector<std::size_t> trained;  ///< the parameters that are its outputs, in order
  int arguments = 0;                 ///< how many ArgumentsOf there are

 private:
  void let_go() noexcept;

  enum class Stage {
    outside,  // of a backward
    entered,  // the unit is exposed
    reduced,  // and the gradients of its parameters are on their way
  } stage_ = Stage::outside;
  bool keeps_ = false;
  std::uint64_t kept_since_ = 0;  // how many backwards had ended
  int arguments_left_ = 0;
};

}  // namespace maniple::detail
