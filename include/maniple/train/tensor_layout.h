// TensorLayout describes how a parameter of this rank relates to the parameters of other ranks.
//
//   for (const auto& item : net->named_parameters())
//     std::cout << item.key() << ": " << maniple::layout_of(item.value()).text() << '\n';
//
//   embed.weight: divided over 4 ranks by fully_shard unit 3 (GptImpl), from [250, 0] of [1000, 64]
//   norm.weight: replicated
//
// fully_shard, the layers of tensor_parallel.h and Pipeline record the layout of their parameters. All functions that
// take a module or a list of parameters read it: clip_grad_norm_ counts each element once, GradScaler makes one
// decision for all ranks that share a parameter, DistributedDataParallel rejects parameters divided over its group, and
// save_weights refuses to save a part as a whole.
//
// The layout belongs to the tensor object. Copies and views of the tensor count as replicated. set_layout records the
// layout of parameters divided by a module of your own:
//
//   weight = register_parameter("weight", my_rows);
//   maniple::set_layout(weight, {.kind = maniple::LayoutKind::tensor_parallel,
//                                .divided_over = {group},
//                                .owner = "MyEmbedding",
//                                .shard = maniple::TensorShard::along("", my_rows, 0, first_row, rows)});
//
// Threads: any thread may call these functions. Lifetime: the records do not keep tensors or groups alive.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>
#include <maniple/train/sharded_checkpoint.h>

namespace MANIPLE_API maniple {

enum class LayoutKind : std::uint8_t {
  replicated,       ///< every rank holds all elements
  pipeline_stage,   ///< this rank holds all elements; other ranks of the pipeline hold other parameters
  tensor_parallel,  ///< this rank holds a part and computes with that part alone
  fully_sharded,    ///< this rank holds some rows; its unit gathers all rows for forward and backward
};

struct TensorLayout {
  LayoutKind kind = LayoutKind::replicated;
  /// The groups whose ranks hold different elements, outermost first. Two groups have at most one rank in common, like
  /// the dimensions of a mesh.
  std::vector<std::shared_ptr<ProcessGroup>> divided_over = {};
  /// False on all ranks but one that hold the same tied parameter of a pipeline, so that norms count it once.
  bool counted = true;
  std::string owner = {};  ///< what divides the parameter, for error messages: "fully_shard unit 3 (GptImpl)"
  TensorShard shard = {};  ///< the part held here; name and `local` are empty; an empty offset: all elements

  bool divided() const noexcept { return kind != LayoutKind::replicated; }
  std::string text() const;
};

/// Returns `replicated` for a tensor without a record. Throws InvalidArgument if one of its groups was destroyed.
TensorLayout layout_of(const torch::Tensor& tensor);
/// Replaces the record. `layout.divided_over` must not hold a null group or a group without this rank.
void set_layout(const torch::Tensor& tensor, TensorLayout layout);

/// Name and layout of the first divided parameter; the name is empty if all parameters are replicated.
struct DividedParameter {
  std::string name;
  TensorLayout layout;
};
DividedParameter first_divided(const torch::nn::Module& module);

/// Copies of all parameters of the module, gathered, under the names of named_parameters(). Collective over the groups
/// that divide them. `only_rank` of these groups receives all parameters; other ranks receive only the undivided ones.
/// -1: all ranks receive all. Throws InvalidArgument for a Pipeline.
std::vector<std::pair<std::string, torch::Tensor>> full_parameters(torch::nn::Module& module, int only_rank = -1);
/// The reverse: every rank copies its part from whole tensors (on any device, of any dtype). Throws InvalidArgument,
/// before anything is changed, for a name that the module lacks, or for another shape. Parameters missing from the list
/// stay unchanged. Local.
void set_full_parameters(torch::nn::Module& module,
                         const std::vector<std::pair<std::string, torch::Tensor>>& parameters);

}  // namespace maniple
