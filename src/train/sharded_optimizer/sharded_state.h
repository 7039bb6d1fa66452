// What ShardedOptimizer is made of, and its state as that of the plain optimizer: what Checkpoint and optim::state_dict
// use.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "train/checkpoint/named_state.h"
#include "train/sharded_optimizer/flat_parameters.h"
#include <maniple/train/sharded_optimizer.h>

namespace maniple {

struct ShardedOptimizerBase::Impl {
  /// What ranks must agree on before they step.
  struct Vote {
    std::uint64_t obstructed = 0;
    std::uint64_t rates = 0;      ///< a hash of the learning rates
    std::uint64_t gradients = 0;  ///< a hash of which parameters have one
    std::uint64_t count = 0;      ///< of those
  };

  ShardedOptimizerBase& self;
  ShardingOptions sharding;
  optim::StepOptions step_options;
  MakeLocal make;
  std::shared_ptr<ProcessGroup> leaders = nullptr;           ///< shared, on several hosts
  std::vector<std::unique_ptr<FlatParameters>> blocks = {};  ///< one for the parameters of each call that brought some
  std::vector<std::vector<const void*>> known = {};          ///< which parameters, by group
  std::unique_ptr<torch::optim::Optimizer> local = nullptr;  ///< its groups are ours, its parameters this rank's slices
  std::vector<std::vector<ParameterSlice>> slices = {};      ///< those parameters, by group
  bool left = false;                                         ///< unshare() was called

  ProcessGroup& group() { return *sharding.group; }

  // Layout: sharded_optimizer.cpp
  /// Parameters that were added since the last layout. Throws when others were taken away.
  std::vector<FlatParameters::Item> fresh();
  void check_fresh(const std::vector<FlatParameters::Item>& items);
  void lay_out_fresh();

  // Steps
  /// Why this rank cannot step; empty: it can.
  std::string obstacle();
  Vote vote(const std::string& obstacle);
  /// Returns when all ranks have arrived, and so have done with their backward.
  void agree();
  void step_slices();
  void step();

  // State: sharded_state.cpp
  void require_current();
  /// The options of this optimizer, which schedulers change, become those of the local one.
  void sync_options();
  /// Of the slices, with the numbers that parameters have in this optimizer.
  NamedState local_state();
  std::vector<ShardOf> shards();
  /// `value(name, entry of tensors, slice)` is the slice's part of a tensor of state.
  template <class Tensors, class Value>
  void restore_from(const std::map<std::string, std::string>& texts, const Tensors& tensors, const Value& value);
};

/// On rank 0 of its group the whole state, in memory of its own; on the others without tensors, and without what
/// belongs to single parameters. Collective.
NamedState whole_state(ShardedOptimizerBase& optimizer);

/// Takes this rank's parts out of a whole state. Throws InvalidArgument for one that does not fit. Local.
void restore_shards(ShardedOptimizerBase& optimizer, const NamedState& whole);

}  // namespace maniple
