// A rank that leaves a call out: the error of the others names that public call, and never a file of the library.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "harness/run_ranks.h"
#include "train/models.h"
#include <maniple/dist.h>
#include <maniple/train/amp.h>
#include <maniple/train/checkpoint.h>
#include <maniple/train/clip_grad.h>
#include <maniple/train/ddp.h>
#include <maniple/train/fully_sharded.h>
#include <maniple/train/metrics.h>
#include <maniple/train/optim.h>
#include <maniple/train/pipeline.h>
#include <maniple/train/placement.h>
#include <maniple/train/post_local_sgd.h>
#include <maniple/train/sharded_optimizer.h>
#include <maniple/train/stop.h>
#include <maniple/train/sync_batch_norm.h>
#include <maniple/train/tensor_parallel.h>
#include <maniple/train/trainer.h>
#include <maniple/train/uneven_inputs.h>

namespace maniple::harness::public_calls_test {
namespace {

using testing_models::loss_of;
using testing_models::Net;
using testing_models::NetImpl;
using testing_models::numbers;
using torch::Tensor;

/// What one rank calls while the other is at a barrier. `prepare` runs on both ranks and returns it.
struct Case {
  const char* name;
  const char* expected;  ///< in the error of both ranks
  bool knows_line;       ///< the call takes the program's line
  std::function<std::function<void()>(Rank&)> prepare;
  int caller = 1;  ///< not one whose part is over before the other comes: the root of a broadcast, a sender of a gather
};

Net filled_net() {
  Net net;
  testing_models::fill(*net, 3);
  return net;
}
Tensor batch() { return numbers({4, 8}); }

/// Something for rank 0 to call, and what it needs.
template <class Made>
std::function<void()> later(std::shared_ptr<Made> made, std::function<void(Made&)> call) {
  return [made, call = std::move(call)] { call(*made); };
}

std::vector<Case> cases() {
  return {
      {"DdpConstructor", "in the constructor of DistributedDataParallel, which all ranks call", false,
       [](Rank& r) -> std::function<void()> {
         return [&r] { DistributedDataParallel<NetImpl> ddp(filled_net(), {.group = r.world}); };
       }},
      {"DdpBackward", "in the backward of DistributedDataParallel", false,
       [](Rank& r) {
         return later<DistributedDataParallel<NetImpl>>(
             std::make_shared<DistributedDataParallel<NetImpl>>(filled_net(), DdpOptions{.group = r.world}),
             [](auto& ddp) { loss_of(ddp.forward(batch())).backward(); });
       }},
      {"UnevenInputs", "(in with_uneven_inputs, which all ranks call)", false,
       [](Rank& r) {
         return later<DistributedDataParallel<NetImpl>>(
             std::make_shared<DistributedDataParallel<NetImpl>>(filled_net(), DdpOptions{.group = r.world}),
             [](auto& ddp) { with_uneven_inputs(ddp, [] {}); });
       }},
      {"CheckpointSave", "in Checkpoint::save, which all ranks call", true,
       [](Rank& r) {
         return later<Checkpoint>(std::make_shared<Checkpoint>(CheckpointOptions{.folder = r.dir(), .group = r.world}),
                                  [](Checkpoint& checkpoint) { checkpoint.save(1); });
       },
       0},
      {"CheckpointSaveSharded", "in Checkpoint::save, which all ranks call", true,
       [](Rank& r) {
         return later<Checkpoint>(
             std::make_shared<Checkpoint>(CheckpointOptions{.folder = r.dir(), .sharded = true, .group = r.world}),
             [](Checkpoint& checkpoint) { checkpoint.save(1); });
       }},
      {"CheckpointLoad", "in Checkpoint::load, which all ranks call", true,
       [](Rank& r) {
         return later<Checkpoint>(std::make_shared<Checkpoint>(CheckpointOptions{.folder = r.dir(), .group = r.world}),
                                  [](Checkpoint& checkpoint) { checkpoint.load(); });
       }},
      {"Metrics", "in Metrics::all_reduce, which all ranks call", true,
       [](Rank& r) -> std::function<void()> {
         return [&r] {
           Metrics metrics;
           metrics.add("loss", 1);
           metrics.all_reduce(r.world);
         };
       }},
      {"ClipGradNorm", "in clip_grad_norm_, which all ranks call", true,
       [](Rank& r) -> std::function<void()> {
         return [&r] {
           Tensor parameter = torch::ones({3}, testing_models::training_device()).requires_grad_();
           parameter.sum().backward();
           clip_grad_norm_(parameter, 1, {.group = r.world});
         };
       }},
      {"GradScaler", "in GradScaler::unscale_, which all ranks call (in GradScaler::step", false,
       [](Rank& r) -> std::function<void()> {
         return [&r] {
           Net net = filled_net();
           torch::optim::SGD optimizer(net->parameters(), 0.1);
           GradScaler scaler({.group = r.world});
           scaler.scale(loss_of(net->forward(batch()))).backward();
           scaler.step(optimizer);
         };
       }},
      {"GracefulStop", "in GracefulStop::requested_anywhere, which all ranks call", true,
       [](Rank& r) -> std::function<void()> {
         return [&r] {
           GracefulStop stop;
           stop.requested_anywhere(r.world);
         };
       }},
      {"EarlyStopping", "in EarlyStopping::update, which all ranks call", true,
       [](Rank& r) -> std::function<void()> {
         return [&r] {
           EarlyStopping stopping({.group = r.world});
           stopping.update(1);
         };
       }},
      {"SyncBatchNormForward", "in the forward of SyncBatchNorm", false,
       [](Rank& r) -> std::function<void()> {
         return [&r] {
           nn::SyncBatchNorm norm(8, r.world);
           norm->to(testing_models::training_device());
           norm->forward(batch());
         };
       }},
      {"SyncBatchNormBackward", "in the backward of SyncBatchNorm", false,
       [](Rank& r) -> std::function<void()> {
         nn::SyncBatchNorm norm(8, r.world);
         norm->to(testing_models::training_device());
         const Tensor output = norm->forward(batch().requires_grad_());
         return [output] { output.pow(2).sum().backward(); };
       }},
      {"ShardedOptimizerConstructor", "in the constructor of ShardedOptimizer, which all ranks call", false,
       [](Rank& r) -> std::function<void()> {
         return [&r] { ShardedOptimizer<optim::AdamW> optimizer(filled_net()->parameters(), 0.1, {r.world}); };
       }},
      {"ShardedOptimizerStep", "in ShardedOptimizer::step, which all ranks call", false,
       [](Rank& r) {
         return later<ShardedOptimizer<optim::AdamW>>(std::make_shared<ShardedOptimizer<optim::AdamW>>(
                                                          filled_net()->parameters(), 0.1, ShardingOptions{r.world}),
                                                      [](auto& optimizer) { optimizer.step(); });
       }},
      {"StateDict", "in optim::state_dict, which all ranks call", false,
       [](Rank& r) {
         return later<ShardedOptimizer<optim::AdamW>>(std::make_shared<ShardedOptimizer<optim::AdamW>>(
                                                          filled_net()->parameters(), 0.1, ShardingOptions{r.world}),
                                                      [](auto& optimizer) { optim::state_dict(optimizer); });
       },
       0},
      {"FullyShard", "in fully_shard, which all ranks call", false,
       [](Rank& r) -> std::function<void()> { return [&r] { fully_shard(filled_net(), {.group = r.world}); }; }},
      {"FullyShardedForward", "in the forward of a fully sharded module", false,
       [](Rank& r) -> std::function<void()> {
         auto unit = fully_shard(filled_net(), {.group = r.world});
         return [unit]() mutable { unit->forward(batch()); };
       }},
      {"FullyShardedBackward", "in the backward of a fully sharded module", false,
       [](Rank& r) -> std::function<void()> {
         auto unit = fully_shard(filled_net(), {.group = r.world});
         const Tensor loss = loss_of(unit->forward(batch()));
         return [unit, loss] { loss.backward(); };
       }},
      {"FullParameters", "in full_parameters, which all ranks call", false,
       [](Rank& r) -> std::function<void()> {
         auto unit = fully_shard(filled_net(), {.group = r.world});
         return [unit]() mutable { full_parameters(*unit); };
       }},
      {"PipelineConstructor", "in the constructor of Pipeline, which all ranks call", false,
       [](Rank& r) -> std::function<void()> {
         return [&r] { Pipeline pipeline({torch::nn::AnyModule(torch::nn::Linear(2, 2))}, {.group = r.world}); };
       }},
      {"TensorParallel", "in reduce_from_group", false,
       [](Rank& r) -> std::function<void()> { return [&r] { reduce_from_group(batch(), r.world); }; }},
      {"TensorParallelBackward", "in the backward of a tensor-parallel layer", false,
       [](Rank& r) -> std::function<void()> {
         const Tensor output = copy_to_group(batch().requires_grad_(), r.world);
         return [output] { output.sum().backward(); };
       }},
      {"ModelAverager", "in PeriodicModelAverager::average_parameters, which all ranks call", false,
       [](Rank& r) -> std::function<void()> {
         return [&r] {
           PeriodicModelAverager averager({.period = 1, .group = r.world});
           averager.average_parameters(filled_net()->parameters());
         };
       }},
      {"TrainerConstructor", "(in the constructor of Trainer, which all ranks call)", false,
       [](Rank& r) -> std::function<void()> {
         return [&r] {
           const Net net = filled_net();
           torch::optim::SGD optimizer(net->parameters(), 0.1);
           Trainer trainer(net, optimizer, {.strategy = strategy::DataParallel{.ddp = {.group = r.world}}});
         };
       }},
      {"TrainerFit", "in the backward of DistributedDataParallel (in Trainer::fit, which all ranks call", true,
       [](Rank& r) -> std::function<void()> {
         struct Training {
           explicit Training(Rank& r)
               : net(filled_net()),
                 optimizer(net->parameters(), 0.1),
                 trainer(net, optimizer,
                         {.progress = false, .strategy = strategy::DataParallel{.ddp = {.group = r.world}}}) {}
           Net net;
           torch::optim::SGD optimizer;
           Trainer trainer;
         };
         return later<Training>(std::make_shared<Training>(r), [](Training& training) {
           const std::vector<Tensor> data = {batch()};
           training.trainer.fit(data, [&](const Tensor& x) { return loss_of(training.net->forward(x)); });
         });
       }},
      {"Balance", "in balance, which all ranks call", false,
       [](Rank& r) -> std::function<void()> {
         return [&r] {
           torch::nn::Sequential layers(torch::nn::Linear(8, 8), torch::nn::Linear(8, 8));
           balanced_cut(layers, 2, ComputeDevice(torch::kCPU), {.sample = torch::ones({1, 8}), .group = r.world});
         };
       }},
      {"DeviceMesh", "all_gather", true,
       [](Rank& r) -> std::function<void()> { return [&r] { DeviceMesh mesh(r.world, {{"data", 2}}); }; }},
  };
}

class PublicCalls : public testing::TestWithParam<Case> {};

TEST_P(PublicCalls, AreNamedWhereARankLeavesOneOut) {
  const Case& one = GetParam();
  run_ranks({.n = 2}, [&](Rank& r) {
    std::string text;
    try {
      const auto call = one.prepare(r);
      if (r.rank == one.caller) {
        call();
      } else {
        r.world->barrier();
      }
      ADD_FAILURE() << "a rank left the call out, and no error was raised";
    } catch (const Mismatch& error) {
      text = error.what();
    }
    EXPECT_NE(text.find(one.expected), std::string::npos) << text;
    // Two places: the barrier's line, and the call's where it is known.
    std::size_t lines = 0;
    for (std::size_t at = text.find("public_calls_test.cpp:"); at != std::string::npos;
         at = text.find("public_calls_test.cpp:", at + 1))
      ++lines;
    EXPECT_EQ(lines, one.knows_line ? 2u : 1u) << text;
    EXPECT_EQ(text.find("/src/"), std::string::npos) << text;
    EXPECT_EQ(text.find("/include/"), std::string::npos) << text;
  });
}

INSTANTIATE_TEST_SUITE_P(Train, PublicCalls, testing::ValuesIn(cases()),
                         [](const testing::TestParamInfo<Case>& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace maniple::harness::public_calls_test
