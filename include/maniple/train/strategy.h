// How a Trainer divides the training over the ranks. The rest of the program stays the same.
//
//   maniple::Trainer trainer(net, optimizer, {.strategy = maniple::strategy::FullySharded{}});
//
//   strategy         each rank holds                             ranks compute on
//   DataParallel     parameters, gradients, optimizer state      different batches
//   Zero1            parameters, gradients, a part of the state  different batches
//   FullySharded     a part of all three                         different batches; the same along tensor_group
//   TensorParallel   a part of each large layer                  the same batch; different ones along data_group
//   Pipeline         some layers                                 the same batch; different ones along data_group
//
// docs/trainer.md compares memory and communication. With every strategy the final parameters are, up to rounding, the
// same as when one process trains on all batches. Every strategy loads the checkpoints of every other strategy. A
// process without a group trains alone, whatever the strategy.
//
// Groups. A null group means the default group. Strategies over several groups take them from a mesh:
//
//   maniple::DeviceMesh mesh(world, {{"data", 4}, {"tensor", 2}});
//   .strategy = maniple::strategy::TensorParallel{
//       .group = mesh["tensor"], .data_group = mesh["data"], .world = mesh.group()}
//
// `world` holds all ranks of the training: they stop together and save checkpoints together. It may stay null if the
// default group has the same ranks. Ranks that compute on the same batch need samplers that return the same batches:
//
//   maniple::DistributedSampler sampler(data.size(), maniple::divide_data(strategy, {.seed = 7}));
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>
#include <maniple/train/ddp.h>
#include <maniple/train/fully_sharded.h>
#include <maniple/train/pipeline.h>
#include <maniple/train/sampler.h>

namespace MANIPLE_API maniple {
namespace strategy {

/// DistributedDataParallel (ddp.h). With `accumulate`, only the last batch of a step communicates.
struct DataParallel {
  DdpOptions ddp = {};  ///< its group is the trainer's group
};

/// DistributedDataParallel with a ShardedOptimizer (sharded_optimizer.h) made from the program's optimizer: SGD, Adam,
/// AdamW, RMSprop or Adagrad of torch::optim, or an optimizer of maniple::optim. The program's optimizer must not have
/// stepped yet. Its options stay in use (schedulers set its learning rate); its state stays empty.
struct Zero1 {
  DdpOptions ddp = {};             ///< its group is the trainer's group
  bool shared_parameters = false;  ///< see ShardingOptions
};

/// fully_shard (fully_sharded.h). The model may contain units or be one; otherwise it becomes a single unit that keeps
/// its parameter objects, so an optimizer made from net->parameters() fits. Outside fit() and evaluate() the parameters
/// hold this rank's rows. In each step rank 0's buffers are copied to all ranks. Gradients are averaged after every
/// batch, even with `accumulate`: full gradients are never kept.
struct FullySharded {
  /// Options for turning the model into a unit. `group` and `replicate_group` hold the ranks with different batches. If
  /// the model is already a unit, its own options apply instead.
  FullyShardOptions shard = {};
  /// The ranks that divide the model's tensor-parallel layers, which compute on the same batches; null: none. Each rank
  /// then holds a part of its part of these layers. Parameters that this group replicates are copied from its rank 0.
  std::shared_ptr<ProcessGroup> tensor_group = nullptr;
  std::shared_ptr<ProcessGroup> world = nullptr;  ///< used with replicate_group or tensor_group: see above
};

/// A model with layers of tensor_parallel.h over `group`. Parameters that are replicated are copied from rank 0 of the
/// group.
struct TensorParallel {
  std::shared_ptr<ProcessGroup> group = nullptr;       ///< the ranks that divide the layers
  std::shared_ptr<ProcessGroup> data_group = nullptr;  ///< the ranks with the same part of the model; null: none
  DdpOptions ddp = {};                                 ///< for the average over data_group; leave its `group` unset
  std::shared_ptr<ProcessGroup> world = nullptr;       ///< used with data_group: see above
};

/// Pipeline (pipeline.h) over the layers of a torch::nn::Sequential. fit() and evaluate() take a criterion() as the
/// loss. The optimizer must not have stepped yet. Parameters on other ranks are removed from it, and their memory is
/// freed.
struct Pipeline {
  std::int64_t micro_batches = 4;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  std::size_t stages_per_rank = 1;       ///< more than 1: PipelineSchedule::interleaved
  std::vector<std::size_t> begins = {};  ///< the first layer of each stage; empty: balance by bytes
  bool activation_checkpointing = false;
  bool dynamic_shapes = false;
  std::shared_ptr<ProcessGroup> group = nullptr;       ///< the ranks of the pipeline
  std::shared_ptr<ProcessGroup> data_group = nullptr;  ///< the ranks with the same stages; null: none
  DdpOptions ddp = {};                                 ///< for the average over data_group; leave its `group` unset
  std::shared_ptr<ProcessGroup> world = nullptr;       ///< used with data_group: see above
};

}  // namespace strategy

using Strategy = std::variant<strategy::DataParallel, strategy::Zero1, strategy::FullySharded, strategy::TensorParallel,
                              strategy::Pipeline>;

/// Returns `options` with `num_replicas` and `rank` set, so that the sampler divides the data over the ranks with
/// different batches.
SamplerOptions divide_data(const Strategy& strategy, SamplerOptions options = {});

/// See criterion().
template <class Function>
struct Criterion {
  Function function;
};

/// A loss as a function of the model's output and the target, for Trainer::fit and evaluate with every strategy. The
/// Trainer itself calls the model with batch.data.
///
///   auto loss_of = [](const auto& output, const auto& target, maniple::Metrics& metrics) {
///     metrics.add_accuracy("accuracy", output, target);
///     return torch::nll_loss(output, target);                            // a mean over the rows
///   };
///   trainer.fit(train, test, maniple::criterion(loss_of));
///
/// The third argument is optional. In a pipeline the function runs once per micro-batch, on the rank of the last stage.
template <class Function>
Criterion<Function> criterion(Function function) {
  return {std::move(function)};
}

}  // namespace maniple
