// Sharded checkpoints: all ranks write their parts in parallel. Any number of ranks can load them, however they divide
// the model.
//
//   maniple::Checkpoint checkpoint({.folder = "runs/7", .sharded = true});
//   checkpoint.add("model", *net).add("optimizer", optimizer);        // as without; see checkpoint.h
//   std::int64_t step = checkpoint.load().value_or(0);
//   checkpoint.save(step);                                            // copies this rank's part and returns
//
// Writing           A tensor, or part of a tensor, that only one rank holds is written by that rank. Data held by
//                   several ranks is written once: large tensors are cut, so that all ranks write about the same
//                   amount.
// Files             FOLDER/step-000000000120/ holds rank-00000-of-00004.safetensors and so on, index.json, which
//                   locates the pieces of every tensor, and manifest.json. The folder appears as a whole, once all
//                   ranks have written and synced. After a kill of any rank at any moment, the previous checkpoint
//                   loads. If one rank cannot write (its disk is full), the previous checkpoint stays, training
//                   continues, and last_error() reports the cause on all ranks.
// Loading           Each rank reads only the pieces that it needs. A checkpoint of either kind loads with `sharded` on
//                   or off, on any number of ranks, into whole tensors or into any division of them. The ranks share
//                   the work of verifying the files.
// Cost              If the layout has changed, save() exchanges a few hundred bytes for each tensor; otherwise 8 bytes
//                   for each replica. Then it copies this rank's part into memory that is reused by later saves, and
//                   returns. If the previous save is still being written, save() waits for it.
// Consistency       Before anything is written the ranks compare what they hold. save() throws InvalidArgument on all
//                   ranks if a tensor has a gap or an overlap, if a name means different tensors on two ranks, or if
//                   replicas differ (a few elements of each are compared). Nothing is left out silently.
//
// What is divided. Parameters of modules that derive from ShardedModule (tensor_parallel.h, fully_sharded.h) are known
// to be shards, and so is their optimizer state, for all optimizers of LibTorch and of optim.h. Modules that derive
// from PartialModule (Pipeline) have different parameters on each rank, and so do their optimizers. Everything else
// that is added is assumed to be the same on all ranks.
//
// Optimizers. The state of a parameter is named after the part and the parameter's name in that part:
// "group.0.parameter.model/3.weight.exp_avg". Therefore add the module, too. Another layout whose module has the same
// names can load the state.
//
// Other divided data is added with two functions:
//
//   auto my_rows = [&] { return maniple::TensorShard::along("table", mine, 0, first_row, rows); };
//   checkpoint.add("embedding",
//       [&] { return maniple::ShardedState{.tensors = {my_rows()}}; },
//       [&](const maniple::SavedPart& saved) { saved.read(my_rows()); });
//
// `maniple checkpoint ls FOLDER` lists checkpoints, `verify` reads and compares them, `merge` makes one file for each
// part, `split` makes one file for each of N ranks: docs/checkpoints.md.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <torch/types.h>

#include <maniple/export.h>
#include <maniple/train/shard_of.h>

namespace MANIPLE_API maniple {

class ProcessGroup;
class SavedCheckpoint;
struct NamedState;
struct TensorBox;

/// The part of a tensor that this rank holds: a range in each dimension.
struct TensorShard {
  std::string name = {};                  ///< name of the whole tensor; the same on all ranks that hold a part of it
  std::vector<std::int64_t> shape = {};   ///< shape of the whole tensor
  std::vector<std::int64_t> offset = {};  ///< index of this rank's first element, in each dimension
  torch::Tensor local = {};               ///< this rank's elements: the tensor itself, on any device, with any strides
  /// The shape to which `offset` and `local` refer, with the tensor's number of elements: {12} for a range of the
  /// flattened {3, 4} tensor. Empty: the tensor's own shape. The same on all ranks.
  std::vector<std::int64_t> view = {};

  static TensorShard whole(std::string name, torch::Tensor tensor);
  /// `local` begins at `offset` in dimension `dim`, in which the whole tensor has `extent` elements.
  static TensorShard along(std::string name, torch::Tensor local, std::int64_t dim, std::int64_t offset,
                           std::int64_t extent);
  /// A range of elements, for saving: shard.local is copied if it is not contiguous.
  static TensorShard flat(const ShardOf& shard);
};

/// One rank's share of one part of a checkpoint.
struct ShardedState {
  std::vector<TensorShard> tensors = {};
  /// Merged over all ranks. Ranks that use the same name must give the same text.
  std::map<std::string, std::string> texts = {};
};

/// A part of a checkpoint that is being loaded. Nothing in it is collective: each rank reads only what it needs.
class SavedPart {
 public:
  struct Tensor {
    torch::ScalarType dtype;
    std::vector<std::int64_t> shape;
  };
  SavedPart(SavedCheckpoint& checkpoint, const std::string& name);
  /// A part in memory, which must outlive this object.
  explicit SavedPart(const NamedState& state);

  const std::map<std::string, std::string>& texts() const;
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }

  /// Returns the whole tensor, on the CPU. Throws InvalidArgument if the part has no tensor of that name, ProtocolError
  /// or SystemError if a file cannot be read.
  torch::Tensor read(const std::string& tensor) const;
  /// Fills shard.local, converting to its dtype. Throws InvalidArgument if the saved tensor has another shape.
  void read(const TensorShard& shard) const;
  void read(const ShardOf& shard) const;

 private:
  /// Reads elements from the file, or from memory.
  torch::Tensor elements(const std::string& tensor, const TensorBox& box, torch::ScalarType dtype) const;

  SavedCheckpoint* checkpoint_ = nullptr;
  const NamedState* memory_ = nullptr;
  std::string name_;
  std::map<std::string, Tensor> tensors_;
};

/// Base class for modules with parameters that are shards; lets Checkpoint recognize them.
class ShardedModule {
 public:
  virtual ~ShardedModule();
  /// Describes a parameter of this module or of a module inside it, by its name in named_parameters(). `name` and
  /// `local` of the result may stay empty. nullopt: the parameter is whole, or the inner module that owns it describes
  /// it. If several nested modules describe a parameter, the outermost one wins.
  virtual std::optional<TensorShard> shard_of(const std::string& parameter) const = 0;
};

/// Base class for modules of which each rank holds only some parameters and buffers, undivided: a pipeline and its
/// stages.
class PartialModule {
 public:
  virtual ~PartialModule();
  /// The name of a parameter or buffer in checkpoints. Unique over all ranks, except for replicas.
  virtual std::string checkpoint_name(const std::string& name) const = 0;
  /// Checkpoint names of all parameters and buffers of all ranks. Those on other ranks are expected in a file.
  virtual const std::set<std::string>& names_of_all_ranks() const = 0;
  /// The ranks that together hold the whole module.
  virtual const std::shared_ptr<ProcessGroup>& divided_over() const = 0;
};

}  // namespace maniple
