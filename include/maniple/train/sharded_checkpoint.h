// Sharded checkpoints: every rank writes what it holds, all at the same time; any other number of ranks, however they
// divide the model, reads it.
//
//   maniple::Checkpoint checkpoint({.folder = "runs/7", .sharded = true});
//   checkpoint.add("model", *net).add("optimizer", optimizer);        // as without; see checkpoint.h
//   std::int64_t step = checkpoint.load().value_or(0);
//   checkpoint.save(step);                                            // copies this rank's part and returns
//
// Who writes what   A tensor that one rank alone holds, or a part of one, is written by that rank. What several ranks
//                   hold is written once: large tensors are cut, so that all ranks have about as much to write.
// Files             FOLDER/step-000000000120/ holds rank-00000-of-00004.safetensors and so on, index.json, which says
//                   where the pieces of every tensor are, and manifest.json. It becomes visible as a whole, when all
//                   ranks have written and synced: killed at any moment, on any rank, the checkpoint before it loads.
//                   If one rank cannot write (its disk is full), the previous checkpoint stays, training goes on, and
//                   last_error() says so on all ranks.
// Loading           Each rank reads the pieces that it needs, and no others. A checkpoint of one kind loads with
//                   `sharded` set or not, on any number of ranks, into whole tensors or into any division of them.
//                   Files are verified by all ranks together.
// Stall             save() exchanges a few hundred bytes for each tensor when the layout has changed, and 8 for each
//                   replica otherwise, copies this rank's part into memory that is kept for the next save, and returns.
//                   A save that is still being written is waited for.
// Safe              Before anything is written the ranks compare what they hold. A tensor with a hole or an overlap, a
//                   name that means different tensors on two ranks, and replicas that are not equal (a few elements of
//                   each are compared) throw InvalidArgument on all ranks: nothing is left out silently.
//
// What is divided. Parameters of modules that derive from ShardedModule (those of tensor_parallel.h and fully_sharded.h
// do) are known to be shards, and so is the state of an optimizer for them: any of LibTorch's, and those of optim.h.
// Modules that derive from PartialModule (Pipeline does) have other parameters on other ranks, and so have their
// optimizers. Everything else that is added is taken for the same on all ranks.
// Optimizers    The state of a parameter is named by the part and the name that the parameter has there:
//               "group.0.parameter.model/3.weight.exp_avg". So its module is added, too, and another layout whose
//               module has these names loads it.
// Whatever else is divided is added as two functions:
//
//   auto my_rows = [&] { return maniple::TensorShard::along("table", mine, 0, first_row, rows); };
//   checkpoint.add("embedding",
//       [&] { return maniple::ShardedState{.tensors = {my_rows()}}; },
//       [&](const maniple::SavedPart& saved) { saved.read(my_rows()); });
//
// `maniple checkpoint ls FOLDER` lists checkpoints, `verify` reads and compares them, `merge` makes one file for each
// part, `split` makes one for each of N ranks: docs/checkpoints.md.
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
#include <maniple/train/shard.h>

namespace MANIPLE_API maniple {

class ProcessGroup;
class SavedCheckpoint;

/// The part of a tensor that this rank holds: a range in each dimension.
struct TensorShard {
  std::string name = {};                  ///< of the whole tensor; the same on all ranks that hold a part of it
  std::vector<std::int64_t> shape = {};   ///< of the whole tensor
  std::vector<std::int64_t> offset = {};  ///< of this rank's first element, in each dimension
  torch::Tensor local = {};               ///< this rank's elements: the tensor itself, on any device and of any strides
  /// The shape in which offset and local are to be understood, with as many elements as the tensor: {12} for a range of
  /// the elements of a {3, 4} tensor in a row. Empty: its own. All ranks give the same.
  std::vector<std::int64_t> view = {};

  static TensorShard whole(std::string name, torch::Tensor tensor);
  /// `local` is what begins at `offset` in dimension `dim`, in which the whole tensor has `extent`.
  static TensorShard along(std::string name, torch::Tensor local, std::int64_t dim, std::int64_t offset,
                           std::int64_t extent);
  /// A range of elements. To be saved: where shard.local is not contiguous it is copied.
  static TensorShard flat(const ShardOf& shard);
};

/// What a rank holds of one part of a checkpoint.
struct ShardedState {
  std::vector<TensorShard> tensors = {};
  /// Those of all ranks are put together; two ranks that give one name must give the same text.
  std::map<std::string, std::string> texts = {};
};

/// A part of a checkpoint that is being loaded. Nothing in it is collective: each rank reads what it wants.
class SavedPart {
 public:
  struct Tensor {
    torch::ScalarType dtype;
    std::vector<std::int64_t> shape;
  };
  SavedPart(SavedCheckpoint& checkpoint, const std::string& name);

  const std::map<std::string, std::string>& texts() const;
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }

  /// All of a tensor, on the CPU. Throws InvalidArgument for a name that the part has not, ProtocolError or SystemError
  /// for a file that cannot be read.
  torch::Tensor read(const std::string& tensor) const;
  /// Fills shard.local, converting to its dtype. Throws InvalidArgument if the saved tensor has another shape.
  void read(const TensorShard& shard) const;
  void read(const ShardOf& shard) const;

 private:
  SavedCheckpoint* checkpoint_;
  std::string name_;
  std::map<std::string, Tensor> tensors_;
};

/// A module some of whose parameters are shards derives from this, too, so that checkpoints know.
class ShardedModule {
 public:
  virtual ~ShardedModule();
  /// Which part of which shape a parameter of this module is; name and local may be left empty. nullopt: it is whole,
  /// or the module that it belongs to knows. Names are those of named_parameters(): also of the modules inside it, to
  /// which this one is asked last.
  virtual std::optional<TensorShard> shard_of(const std::string& parameter) const = 0;
};

/// A module of which each rank holds some parameters and buffers, whole ones, derives from this, too: a pipeline with
/// its stages.
class PartialModule {
 public:
  virtual ~PartialModule();
  /// The name that a parameter or buffer has in checkpoints: no other tensor of any rank has it, but replicas.
  virtual std::string checkpoint_name(const std::string& name) const = 0;
  /// Of all parameters and buffers of all ranks, in checkpoints: those of others are no mistake there.
  virtual const std::set<std::string>& names_of_all_ranks() const = 0;
  /// The ranks that together hold all of it.
  virtual const std::shared_ptr<ProcessGroup>& divided_over() const = 0;
};

}  // namespace maniple
