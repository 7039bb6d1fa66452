// What a Trainer refuses, by name and before anything has changed; and what it does with gradients, data and models
// that need care when ranks divide the model.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "harness/error_of.h"
#include "harness/run_ranks.h"
#include "harness/temporary_directory.h"
#include "train/models.h"
#include <maniple/comm/mesh.h>
#include <maniple/train/lr_scheduler.h>
#include <maniple/train/optim.h>
#include <maniple/train/tensor_parallel.h>
#include <maniple/train/trainer.h>

namespace maniple::harness::trainer_refusals_test {
namespace {

using testing_models::Net;
using testing_models::numbers;
using Batches = std::vector<torch::data::Example<>>;

Batches some_batches(int count, int seed = 0) {
  Batches batches;
  for (int i = 0; i < count; ++i) batches.emplace_back(numbers({4, 8}, seed + i), numbers({4, 4}, seed + i + 100));
  return batches;
}
torch::nn::Sequential layers() {
  torch::nn::Sequential net(torch::nn::Linear(8, 12), torch::nn::Tanh(), torch::nn::Linear(12, 4));
  testing_models::fill(*net, 1);
  return net;
}
torch::nn::Sequential divided_layers(const std::shared_ptr<ProcessGroup>& group) {
  return torch::nn::Sequential(nn::ColumnParallelLinear(8, 12, nn::ColumnParallelOptions{.group = group}),
                               torch::nn::Tanh(), nn::RowParallelLinear(12, 4, nn::RowParallelOptions{.group = group}));
}
const auto mean_square =
    criterion([](const torch::Tensor& output, const torch::Tensor& target) { return torch::mse_loss(output, target); });
TrainerOptions options_with(Strategy strategy) {
  return {.graceful_stop = false, .log_every = 1, .progress = false, .strategy = std::move(strategy)};
}

/// What the constructor throws; the parameters are as before.
template <class Model>
std::string refusal(const Model& model, const Strategy& strategy) {
  std::vector<torch::Tensor> before;
  for (const torch::Tensor& one : model->parameters()) before.push_back(one.detach().clone());
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const std::string text = error_of([&] { Trainer trainer(model, optimizer, options_with(strategy)); });
  const auto after = model->parameters();
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(after[i].equal(before[i])) << i;
  EXPECT_EQ(optimizer.param_groups()[0].params().size(), before.size());
  return text;
}

void expect_in(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text << "\nlacks: " << part;
}

TEST(TrainerRefusals, AModelThatTheStrategyDoesNotFit) {
  run_ranks({.n = 2}, [](Rank& r) {
    const strategy::DataParallel data{.ddp = {.group = r.world}};
    const strategy::TensorParallel tensor{.group = r.world};
    const strategy::FullySharded sharded{.shard = {.group = r.world}};
    const strategy::Pipeline stages{.group = r.world};
    const auto fully = fully_shard(Net(), {.group = r.world});
    expect_in(refusal(fully, data), {"parameter fc1.weight", ".strategy = maniple::strategy::FullySharded{}"});
    expect_in(refusal(fully, strategy::Zero1{.ddp = {.group = r.world}}), {"Zero1", "FullySharded{}"});
    expect_in(refusal(fully, tensor), {"parameter fc1.weight", "TensorParallel"});
    const auto divided = divided_layers(r.world);
    expect_in(refusal(divided, data), {"parameter 0.weight", ".strategy = maniple::strategy::TensorParallel{}"});
    expect_in(refusal(divided, sharded), {"parameter 0.weight", "set its tensor_group", "TensorParallel{}"});
    expect_in(refusal(divided, stages), {"parameter 0.weight", "TensorParallel{}"});
    expect_in(refusal(layers(), tensor), {"no tensor-parallel layer", "DataParallel{}"});
    expect_in(refusal(Net(), stages), {"torch::nn::Sequential", "NetImpl"});
    const auto half = r.world->split(r.rank);
    expect_in(refusal(divided_layers(half), strategy::TensorParallel{.group = r.world}), {"0.weight", "same group"});
  });
}

TEST(TrainerRefusals, OptionsThatContradictEachOther) {
  run_ranks({.n = 4}, [](Rank& r) {
    const DeviceMesh mesh(r.world, {{"data", 2}, {"model", 2}});
    const auto data = mesh["data"], model = mesh["model"];
    expect_in(refusal(layers(), strategy::Pipeline{.group = model, .data_group = data}),
              {"2 x 2 ranks", "`world`", "mesh.group()"});
    expect_in(refusal(layers(), strategy::Pipeline{.group = model, .data_group = data, .world = model}),
              {"world of 2 ranks"});
    expect_in(refusal(layers(), strategy::Pipeline{.group = model, .ddp = {.group = data}}),
              {"set data_group instead"});
    expect_in(refusal(layers(), strategy::Pipeline{.stages_per_rank = 2, .group = model}), {"interleaved"});
    expect_in(refusal(divided_layers(model), strategy::TensorParallel{.group = model, .ddp = {.group = data}}),
              {"set data_group instead"});
  });
}

TEST(TrainerRefusals, GroupsThatDoNotDivideTheModelInTwoWays) {
  run_ranks({.n = 4}, [](Rank& r) {
    const DeviceMesh mesh(r.world, {{"shard", 2}, {"tensor", 2}});
    const auto shard = mesh["shard"], tensor = mesh["tensor"];
    const auto with = [&](const auto& group, const auto& tensor_group, const auto& world) {
      return strategy::FullySharded{.shard = {.group = group}, .tensor_group = tensor_group, .world = world};
    };
    const std::shared_ptr<ProcessGroup> none;
    expect_in(refusal(divided_layers(tensor), with(tensor, shard, r.world)),
              {"parameter 0.weight", "has tensor_group", "of these layers"});
    expect_in(refusal(divided_layers(tensor), with(r.world, tensor, r.world)),
              {"several ranks in common", "different dimensions of a mesh"});
    expect_in(refusal(divided_layers(tensor), with(shard, tensor, none)), {"2 x 2 ranks", "`world`", "mesh.group()"});
    expect_in(refusal(fully_shard(divided_layers(tensor), {.group = shard}), with(shard, none, r.world)),
              {"parameter 0.weight", "set its tensor_group"});
    const auto data = divide_data(with(shard, tensor, mesh.group()));
    EXPECT_EQ(data.num_replicas, 2);
    EXPECT_EQ(data.rank, mesh.coordinate("shard"));
    const auto halves = r.world->split(r.rank % 2);  // not a mesh: ranks 0 and 2, 1 and 3
    EXPECT_EQ(divide_data(with(tensor, halves, r.world)).rank, tensor->rank());
  });
}

TEST(TrainerRefusals, OptimizersWhoseStateCannotBeDivided) {
  run_ranks({.n = 2}, [](Rank& r) {
    const strategy::Zero1 zero{.ddp = {.group = r.world}};
    Net net;
    torch::optim::LBFGS whole(net->parameters());
    expect_in(error_of([&] { Trainer trainer(net, whole, options_with(zero)); }), {"torch::optim::LBFGS", "AdamW"});
    torch::optim::Adam used(net->parameters());
    net->forward(numbers({2, 8})).sum().backward();
    used.step();
    for (const Strategy& one : {Strategy(zero), Strategy(strategy::FullySharded{.shard = {.group = r.world}})})
      expect_in(error_of([&] { Trainer trainer(net, used, options_with(one)); }), {"has made steps", "checkpoint"});
  });
}

TEST(TrainerRefusals, DataThatTheStrategyCannotUse) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto net = layers();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    Trainer trainer(net, optimizer, options_with(strategy::Pipeline{.group = r.world}));
    const auto by_batch = [&](auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); };
    expect_in(error_of([&] { trainer.fit(some_batches(2), by_batch); }), {"maniple::criterion"});
    expect_in(error_of([&] { trainer.evaluate(some_batches(2), by_batch); }), {"maniple::criterion"});
    expect_in(error_of([&] { trainer.fit(some_batches(2, r.rank), mean_square); }),
              {"same batches", "maniple::divide_data(strategy)"});
    EXPECT_EQ(trainer.state().step, 0);
    EXPECT_EQ(trainer.fit(some_batches(2), mean_square).step, 2) << "it stays usable";
  });
}

TEST(TrainerRefusals, DivideDataGivesRanksOfOnePipelineTheSameSamples) {
  run_ranks({.n = 4}, [](Rank& r) {
    const DeviceMesh mesh(r.world, {{"data", 2}, {"model", 2}});
    const auto all = divide_data(strategy::DataParallel{.ddp = {.group = r.world}}, {.seed = 3});
    EXPECT_EQ(all.num_replicas, 4);
    EXPECT_EQ(all.rank, r.rank);
    EXPECT_EQ(all.seed, 3U);
    const auto pair =
        divide_data(strategy::Pipeline{.group = mesh["model"], .data_group = mesh["data"], .world = mesh.group()});
    EXPECT_EQ(pair.num_replicas, 2);
    EXPECT_EQ(pair.rank, mesh.coordinate("data"));
    EXPECT_EQ(divide_data(strategy::TensorParallel{.group = r.world}).num_replicas, 1);
  });
}

// ---- FullySharded --------------------------------------------------------------------------------------------------

TEST(TrainerFullySharded, RanksEvaluateDifferentNumbersOfBatches) {
  Net alone;
  testing_models::fill(*alone, 1);
  torch::optim::SGD unused(alone->parameters(), 0.1);
  const auto loss_of = [](auto& net) {
    return [&net](auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); };
  };
  const double expected =
      Trainer(alone, unused, options_with(strategy::DataParallel{})).evaluate(some_batches(4), loss_of(alone))["loss"];
  run_ranks({.n = 3}, [&](Rank& r) {
    Net net;
    testing_models::fill(*net, 1);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    Trainer trainer(net, optimizer, options_with(strategy::FullySharded{.shard = {.group = r.world}}));
    Batches mine = some_batches(4);
    mine =
        r.rank == 0 ? Batches(mine.begin(), mine.begin() + 2) : Batches(1, mine[static_cast<std::size_t>(r.rank + 1)]);
    const MetricRow row = trainer.evaluate(mine, loss_of(net));
    EXPECT_NEAR(row["loss"], expected, 1e-5);
    EXPECT_EQ(row.at("loss").count, 16);
    expect_in(error_of([&] { trainer.evaluate(r.rank == 1 ? Batches() : mine, loss_of(net)); }),
              {r.rank == 1 ? "rank 1 has no batch to evaluate" : "another rank has no batch to evaluate"});
    EXPECT_FALSE(trainer.evaluate(Batches(), loss_of(net)).contains("loss")) << "none anywhere";
    EXPECT_NEAR(trainer.evaluate(mine, loss_of(net))["loss"], expected, 1e-5);
  });
}

struct BlocksImpl : torch::nn::Module {
  explicit BlocksImpl(const std::shared_ptr<ProcessGroup>& group) {
    first = register_module("first",
                            group ? torch::nn::AnyModule(fully_shard(torch::nn::Linear(8, 8), {.group = group})).ptr()
                                  : torch::nn::Linear(8, 8).ptr());
    forward_first = [this, group](const torch::Tensor& x) {
      if (group) return dynamic_cast<FullyShardedImpl<torch::nn::LinearImpl>&>(*first).forward(x);
      return dynamic_cast<torch::nn::LinearImpl&>(*first).forward(x);
    };
    last = register_module("last", torch::nn::Linear(8, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last->forward(torch::tanh(forward_first(x))); }
  std::shared_ptr<torch::nn::Module> first;
  std::function<torch::Tensor(const torch::Tensor&)> forward_first;
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Blocks);

/// Parameters after three steps on whole batches of `data_ranks` ranks.
template <class Model, class Call>
NamedTensors trained(const Model& net, const Strategy& strategy, const Call& call, int data_rank, int data_ranks) {
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  TrainerOptions options = options_with(strategy);
  options.max_grad_norm = 0.5;
  Trainer trainer(net, optimizer, options);
  Batches batches = some_batches(3);
  for (auto& batch : batches)
    batch = {testing_models::shard(batch.data, data_rank, data_ranks),
             testing_models::shard(batch.target, data_rank, data_ranks)};
  trainer.fit(batches, [&](auto& batch) { return torch::mse_loss(call(batch.data), batch.target); });
  return full_parameters(trainer.module());
}

TEST(TrainerFullySharded, UnitsInsideTheModelAndModelsThatAreUnits) {
  torch::manual_seed(1);
  Blocks whole(std::shared_ptr<ProcessGroup>{});
  const NamedTensors begin = [&] {
    NamedTensors copies;
    for (const auto& item : whole->named_parameters()) copies.emplace_back(item.key(), item.value().detach().clone());
    return copies;
  }();
  const auto expected =
      trained(whole, strategy::DataParallel{}, [&](const auto& x) { return whole->forward(x); }, 0, 1);
  run_ranks({.n = 2}, [&](Rank& r) {
    const strategy::FullySharded sharded{.shard = {.group = r.world}};
    const auto filled = [&] {
      Blocks net(r.world);
      const torch::NoGradGuard no_grad;
      set_full_parameters(*net, begin);
      return net;
    };
    Blocks inner = filled();
    auto root = fully_shard(filled(), {.group = r.world});
    for (const auto& result :
         {trained(
              inner, sharded, [&](const auto& x) { return inner->forward(x); }, r.rank, r.size),
          trained(root, strategy::FullySharded{}, [&](const auto& x) { return root(x); }, r.rank, r.size)}) {
      ASSERT_EQ(result.size(), expected.size());
      for (std::size_t i = 0; i < result.size(); ++i) {
        EXPECT_EQ(result[i].first, expected[i].first);
        EXPECT_TRUE(torch::allclose(result[i].second, expected[i].second, 1e-4, 1e-6)) << result[i].first;
      }
    }
  });
}

TEST(TrainerFullySharded, ReplicatedParametersBecomeThoseOfTheFirstRankOfTheTensorGroup) {
  for (const bool unit : {false, true}) {
    run_ranks({.n = 4}, [&](Rank& r) {
      const DeviceMesh mesh(r.world, {{"shard", 2}, {"tensor", 2}});
      auto net = divided_layers(mesh["tensor"]);
      const torch::Tensor bias = net[2]->as<nn::RowParallelLinear>()->bias;
      {
        const torch::NoGradGuard no_grad;
        bias.fill_(r.rank);
      }
      const FullyShardOptions shard{.group = mesh["shard"]};
      const auto train = [&](const auto& model) {
        torch::optim::SGD optimizer(model->parameters(), 0.1);
        Trainer trainer(model, optimizer,
                        options_with(strategy::FullySharded{
                            .shard = shard, .tensor_group = mesh["tensor"], .world = mesh.group()}));
        const NamedTensors wholes = full_parameters(trainer.module());
        EXPECT_EQ(wholes[3].first, "2.bias");
        EXPECT_TRUE(wholes[3].second.equal(torch::zeros({4}))) << wholes[3].second;
      };
      if (unit) {
        train(fully_shard(net, shard));
      } else {
        train(net);
      }
    });
  }
}

// ---- Every strategy ------------------------------------------------------------------------------------------------

struct Case {
  std::string name;
  std::function<Strategy(Rank&)> strategy;
  bool tensor_parallel = false;
  bool same_batches = false;
};
const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"data", [](Rank& r) { return strategy::DataParallel{.ddp = {.group = r.world}}; }},
      {"zero1", [](Rank& r) { return strategy::Zero1{.ddp = {.group = r.world}}; }},
      {"fully sharded", [](Rank& r) { return strategy::FullySharded{.shard = {.group = r.world}}; }},
      {"tensor", [](Rank& r) { return strategy::TensorParallel{.group = r.world}; }, true, true},
      {"pipeline", [](Rank& r) { return strategy::Pipeline{.micro_batches = 2, .group = r.world}; }, false, true}};
  return all;
}

TEST(TrainerStrategies, ANaNIsNamedOnAllRanksOrLeftOutOnAll) {
  for (const Case& one : cases()) {
    SCOPED_TRACE(one.name);
    run_ranks({.n = 2}, [&](Rank& r) {
      for (const auto choice : {NonfiniteGradients::stop, NonfiniteGradients::skip}) {
        auto net = one.tensor_parallel ? divided_layers(r.world) : layers();
        torch::optim::SGD optimizer(net->parameters(), 0.1);
        TrainerOptions options = options_with(one.strategy(r));
        options.nonfinite_gradients = choice;
        Trainer trainer(net, optimizer, options);
        Batches batches = some_batches(3);
        if (one.same_batches || r.rank == 1) batches[1].data[0][0] = std::numeric_limits<double>::quiet_NaN();
        const std::string text = error_of([&] { trainer.fit(batches, mean_square); });
        if (choice == NonfiniteGradients::stop) {
          expect_in(text, {"gradients of step 1 are not finite", one.same_batches ? "on rank 0" : "on rank 1",
                           "the loss is nan and the gradient of parameter 0.weight is not finite"});
          EXPECT_EQ(trainer.state().step, 1);
        } else {
          EXPECT_EQ(text, "no error");
          EXPECT_EQ(trainer.state().step, 3);
        }
        for (const torch::Tensor& parameter : net->parameters()) EXPECT_TRUE(parameter.isfinite().all().item<bool>());
        EXPECT_TRUE(std::isfinite(trainer.evaluate(some_batches(1), mean_square)["loss"]));
      }
    });
  }
}

TEST(TrainerStrategies, TheBestModelIsKeptAndTheTrainingEndsEarlyOnAllRanks) {
  for (const Case& one : cases()) {
    SCOPED_TRACE(one.name);
    const TemporaryDirectory folder;
    run_ranks({.n = 2}, [&](Rank& r) {
      auto net = one.tensor_parallel ? divided_layers(r.world) : layers();
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      TrainerOptions options = options_with(one.strategy(r));
      options.epochs = 50;
      options.patience = 2;
      options.lr = [](std::int64_t step, double base) { return step < 6 ? base : -base; };  // then it gets worse
      options.checkpoint = {.folder = folder.path(), .background = false};
      Trainer trainer(net, optimizer, options);
      const TrainerState& end = trainer.fit(some_batches(2), some_batches(2), mean_square);
      EXPECT_EQ(end.end, TrainerEnd::early);
      EXPECT_EQ(end.epoch, 5U) << "the best one and two worse ones";
      r.world->barrier();
      auto alone = layers();
      Checkpoint best({.folder = folder.path() + "/best"});
      best.add("model", *alone);
      EXPECT_EQ(best.load({}), 6);
    });
  }
}

TEST(TrainerStrategies, ASchedulerOfTheProgramsOptimizerSetsTheRate) {
  for (const Case& one : cases()) {
    SCOPED_TRACE(one.name);
    const TemporaryDirectory folder;
    run_ranks({.n = 2}, [&](Rank& r) {
      const auto weights = [&](std::size_t epochs, const std::string& at) {
        auto net = one.tensor_parallel ? divided_layers(r.world) : layers();
        if (one.tensor_parallel) {
          for (auto& parameter : net->parameters()) torch::nn::init::constant_(parameter, 0.1);
        }
        optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
        LrScheduler scheduler(optimizer, lr::one_cycle({.max_lr = 0.2, .steps = 6}));
        TrainerOptions options = options_with(one.strategy(r));
        options.epochs = epochs;
        options.schedule = [&] { scheduler.step(); };
        options.checkpoint = {.folder = at, .background = false};
        Trainer trainer(net, optimizer, options);
        trainer.add("scheduler", scheduler);
        trainer.fit(some_batches(3), mean_square);
        std::vector<torch::Tensor> result;
        for (const torch::Tensor& parameter : net->parameters()) result.push_back(parameter.detach().clone());
        return result;
      };
      const auto straight = weights(2, folder.path() + "/straight");
      weights(1, folder.path() + "/parts");
      const auto parts = weights(2, folder.path() + "/parts");
      for (std::size_t i = 0; i < parts.size(); ++i) EXPECT_TRUE(parts[i].equal(straight[i])) << i;
    });
  }
}

}  // namespace
}  // namespace maniple::harness::trainer_refusals_test
