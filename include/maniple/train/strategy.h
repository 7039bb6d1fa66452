// Strategy: how a Trainer divides a training over the ranks. The rest of the program stays the same.
//
//   maniple::Trainer trainer(net, optimizer, {.strategy = maniple::strategy::FullySharded{}});
//
//   strategy         each rank holds                             ranks compute on
//   DataParallel     parameters, gradients, optimizer state      different batches
//   Zero1            parameters, gradients, a part of the state  different batches
//   FullySharded     a part of all three                         different batches
//   TensorParallel   a part of each large layer                  the same batch; different ones along data_group
//   Pipeline         some layers                                 the same batch; different ones along data_group
//
// docs/trainer.md compares memory and communication. Every strategy ends with the parameters of one process that trains
// on all batches, up to rounding, and loads the checkpoints of every other strategy. A process without a group trains
// alone, whatever the strategy.
//
// Groups. Null groups are the default group. Strategies over two groups take them from a mesh:
//
//   maniple::DeviceMesh mesh(world, {{"data", 4}, {"tensor", 2}});
//   .strategy = maniple::strategy::TensorParallel{
//       .group = mesh["tensor"], .data_group = mesh["data"], .world = mesh.group()}
//
// `world` holds all ranks of the training: they stop together and save checkpoints together. It may stay null where all
// ranks are those of the default group. Ranks that compute on the same batch need samplers that hand out the same
// batches:
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

/// DistributedDataParallel (ddp.h). Under `accumulate`, only the last batch of a step communicates.
struct DataParallel {
  DdpOptions ddp = {};  ///< its group is the training's
};

/// DistributedDataParallel and a ShardedOptimizer (sharded_optimizer.h) made from the program's optimizer: SGD, Adam,
/// AdamW, RMSprop or Adagrad of torch::optim, or one of maniple::optim, which has not stepped yet. The program's object
/// keeps the options (schedules set its learning rate); its state stays empty.
struct Zero1 {
  DdpOptions ddp = {};             ///< its group is the training's
  bool shared_parameters = false;  ///< see ShardingOptions
};

/// fully_shard (fully_sharded.h). The model may hold units already, or be one; otherwise it becomes one unit, with its
/// own parameter objects, so an optimizer made from net->parameters() fits. Outside fit() and evaluate() the parameters
/// are this rank's rows. Buffers become rank 0's in each step. Every batch averages its gradients, also under
/// `accumulate`: whole gradients are never kept.
struct FullySharded {
  /// Of the model as a unit. Its group, and replicate_group, hold the ranks with different batches. For a model that is
  /// a unit already, only the unit's own options count.
  FullyShardOptions shard = {};
  std::shared_ptr<ProcessGroup> world = nullptr;  ///< with replicate_group: see above
};

/// A model with layers of tensor_parallel.h over `group`. Parameters that every rank holds become those of the group's
/// rank 0.
struct TensorParallel {
  std::shared_ptr<ProcessGroup> group = nullptr;       ///< the ranks that divide the layers
  std::shared_ptr<ProcessGroup> data_group = nullptr;  ///< the ranks with the same part of the model; null: none
  DdpOptions ddp = {};                                 ///< of the average over data_group; leave its `group` unset
  std::shared_ptr<ProcessGroup> world = nullptr;       ///< with data_group: see above
};

/// Pipeline (pipeline.h) over the layers of a torch::nn::Sequential. fit() and evaluate() take a criterion() as the
/// loss. The optimizer has not stepped yet; parameters on other ranks leave it, and their memory is freed.
struct Pipeline {
  std::int64_t micro_batches = 4;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  std::size_t stages_per_rank = 1;       ///< more than 1: PipelineSchedule::interleaved
  std::vector<std::size_t> begins = {};  ///< the first layer of each stage; empty: cut by bytes
  bool activation_checkpointing = false;
  bool dynamic_shapes = false;
  std::shared_ptr<ProcessGroup> group = nullptr;       ///< the ranks of the pipeline
  std::shared_ptr<ProcessGroup> data_group = nullptr;  ///< the ranks with the same stages; null: none
  DdpOptions ddp = {};                                 ///< of the average over data_group; leave its `group` unset
  std::shared_ptr<ProcessGroup> world = nullptr;       ///< with data_group: see above
};

}  // namespace strategy

using Strategy = std::variant<strategy::DataParallel, strategy::Zero1, strategy::FullySharded, strategy::TensorParallel,
                              strategy::Pipeline>;

/// The options, with `num_replicas` and `rank` set so that the sampler divides the data over the ranks that have
/// different batches.
SamplerOptions divide_data(const Strategy& strategy, SamplerOptions options = {});

/// See criterion().
template <class Function>
struct Criterion {
  Function function;
};

/// A loss that is a function of the model's output and the target, for Trainer::fit and evaluate with every strategy:
/// the Trainer itself calls the model with batch.data.
///
///   auto loss_of = [](const auto& output, const auto& target, maniple::Metrics& metrics) {
///     metrics.add_accuracy("accuracy", output, target);
///     return torch::nll_loss(output, target);                            // a mean over the rows
///   };
///   trainer.fit(train, test, maniple::criterion(loss_of));
///
/// The third argument may be left out. In a pipeline the function runs on the rank of the last stage, once per
/// micro-batch.
template <class Function>
Criterion<Function> criterion(Function function) {
  return {std::move(function)};
}

}  // namespace maniple
