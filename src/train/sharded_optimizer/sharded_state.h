// The members of ShardedOptimizer, and its state in the form of the plain optimizer's state, for Checkpoint and
// optim::state_dict.
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
    std::uint64_t gradients = 0;  ///< a hash of which parameters have a gradient
    std::uint64_t count = 0;      ///< parameters with a gradient
  };

  ShardedOptimizerBase& self;
  ShardingOptions sharding;
  optim::StepOptions step_options;
  MakeLocal make;
  std::shared_ptr<ProcessGroup> leaders = nullptr;           ///< shared, on several hosts
  std::vector<std::unique_ptr<FlatParameters>> blocks = {};  ///< one for each call that added parameters
  std::vector<std::vector<const void*>> known = {};          ///< parameters already laid out, by group
  std::unique_ptr<torch::optim::Optimizer> local = nullptr;  ///< has our groups, with this rank's slices as parameters
  std::vector<std::vector<ParameterSlice>> slices = {};      ///< the slices, by group
  bool left = false;                                         ///< unshare() was called

  ProcessGroup& group() { return *sharding.group; }

  // Layout: sharded_optimizer.cpp
  /// Parameters added since the last layout. Throws if parameters were removed.
  std::vector<FlatParameters::Item> fresh();
  void check_fresh(const std::vector<FlatParameters::Item>& items);
  void lay_out_fresh();

  // Steps
  /// Why this rank cannot step; empty if it can.
  std::string obstacle();
  Vote vote(const std::string& obstacle);
  /// Returns when all ranks have arrived, and so have finished their backward.
  void agree();
  void step_slices();
  void step();

  // State: sharded_state.cpp
  void require_current();
  /// Copies the options of this optimizer, which schedulers change, to the local one.
  void sync_options();
  /// State of the slices, with the parameter numbers of this optimizer.
  NamedState local_state();
  std::vector<ShardOf> shards();
  /// `value(name, entry of tensors, slice)` returns the slice's part of a state tensor.
  template <class Tensors, class Value>
  void restore_from(const std::map<std::string, std::string>& texts, const Tensors& tensors, const Value& value);
};

/// On rank 0 of its group, the whole state in its own memory. On other ranks, no tensors and no state of single
/// parameters. Collective.
NamedState whole_state(ShardedOptimizerBase& optimizer);

/// Restores this rank's parts of a whole state. Throws InvalidArgument if the state does not fit. Local.
void restore_shards(ShardedOptimizerBase& optimizer, const NamedState& whole);

}  // namespace maniple
