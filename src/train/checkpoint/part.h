// A part of a checkpoint: how it describes its state as tensors and texts, and how it restores that state.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/torch.h>

#include "train/checkpoint/named_state.h"
#include "train/checkpoint/save_plan.h"
#include <maniple/train/checkpoint.h>
#include <maniple/train/sharded_checkpoint.h>
#include <maniple/train/sharded_optimizer.h>

namespace maniple {

struct PartState {
  struct Tensor {
    TensorShard shard;
    bool of_lowest_rank = false;  ///< see HeldBox
  };
  enum class Texts {
    of_rank_0,  ///< texts may differ; rank 0's are saved
    equal,      ///< texts must be equal on all ranks
    united,     ///< texts of all ranks are saved
  };
  std::vector<Tensor> tensors;
  std::map<std::string, std::string> texts;
  Texts kind = Texts::of_rank_0;
};

/// The layout of every parameter of the modules that were added: its shard, and its names in the checkpoint.
struct Layouts {
  struct Parameter {
    TensorShard shard;
    std::vector<std::string> names;  ///< "model/3.weight"; several if modules share the parameter
  };
  std::unordered_map<const c10::TensorImpl*, Parameter> of;
  bool partial = false;  ///< ranks have different parameters: the stages of a pipeline

  const Parameter* find(const torch::Tensor& parameter) const {
    const auto found = of.find(parameter.unsafeGetTensorImpl());
    return found == of.end() ? nullptr : &found->second;
  }
};

struct Part {
  std::string name;
  /// The layouts are null if one rank writes the whole checkpoint.
  std::function<PartState(const Layouts*)> save;
  std::function<void(const SavedPart&, const LoadOptions&, const Layouts&)> load;
  std::function<void(Layouts&)> add_layouts = {};  ///< set for modules
  ShardedOptimizerBase* divided = nullptr;         ///< if set, `save` gathers its state on rank 0, collectively
  std::function<void(PartState&, const Layouts&)> annotate = {};  ///< adds names to a state saved without layouts
};

Part module_part(const std::string& name, torch::nn::Module& module);
Part module_part(const std::string& name, torch::jit::Module& module);
Part optimizer_part(const std::string& name, torch::optim::Optimizer& optimizer);
/// A part to which each rank writes its share of the state.
Part sharded_optimizer_part(const std::string& name, ShardedOptimizerBase& optimizer);
Part scheduler_part(const std::string& name, torch::optim::LRScheduler& scheduler);
Part tensor_part(const std::string& name, torch::Tensor& tensor);
Part text_part(const std::string& name, std::function<std::string()> save,
               std::function<void(const std::string&)> load);

/// The state of a part that one rank writes alone. Throws InvalidArgument if it contains a shard.
NamedState whole_state(const PartState& state, const std::string& part);

/// The shard of a parameter under another name, with `local` as its tensor.
TensorShard shard_with(const Layouts* layouts, const std::string& name, const torch::Tensor& parameter,
                       const torch::Tensor& local);

/// The name of a parameter of the module that is a shard, or that other ranks of `ranks` hold; empty if there is none.
/// `ranks` may be null.
std::string first_held_elsewhere(torch::nn::Module& module, const ProcessGroup* ranks);

/// The box of a shard. Throws InvalidArgument if the shard is inconsistent.
TensorBox box_of(const TensorShard& shard);

}  // namespace maniple
