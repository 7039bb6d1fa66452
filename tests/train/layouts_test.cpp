// What every function that takes parameters does with parameters that ranks divide: the right thing, or an error that
// names one.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <optional>
#include <set>

#include "harness/error_of.h"
#include "harness/run_ranks.h"
#include "harness/shared_folder.h"
#include "train/models.h"
#include <maniple/maniple.h>

namespace maniple::harness::layouts_test {
namespace {

using maniple::testing_models::numbers;
using torch::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Rows that two or three ranks do not divide evenly; the output layer uses the weight of the first.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    const torch::NoGradGuard no_grad;
    first->weight.copy_(numbers({5, 5}, 1));
    first->bias.copy_(numbers({5}, 2));
    middle->weight.copy_(numbers({5, 5}, 3));
    middle->bias.copy_(numbers({5}, 4));
    head = register_parameter("head", first->weight);  // tied
  }
  Tensor forward(const Tensor& x) { return torch::linear(torch::tanh(middle(torch::tanh(first(x)))), head); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(5, 5)),
                    middle = register_module("middle", torch::nn::Linear(5, 5));
  Tensor head;
};
TORCH_MODULE(Net);

Tensor batch(int rank) { return numbers({4, 5}, 20 + rank); }
Tensor loss_of(const Tensor& y) { return 100 * (y - 0.3).pow(2).mean(); }

/// The gradients' mean over the batches of `ranks` ranks, in one process.
Net reference(int ranks) {
  Net net;
  for (int rank = 0; rank < ranks; ++rank) (loss_of(net(batch(rank))) / ranks).backward();
  return net;
}
std::vector<Tensor> once(const torch::nn::Module& module) {
  std::vector<Tensor> result;
  std::set<const void*> seen;
  for (const Tensor& one : module.parameters()) {
    if (seen.insert(one.unsafeGetTensorImpl()).second) result.push_back(one);
  }
  return result;
}
double norm_of(const std::vector<Tensor>& parameters, double p = 2) {
  std::vector<Tensor> flat;
  for (const Tensor& one : parameters) flat.push_back(one.grad().flatten().to(torch::kFloat64));
  return torch::linalg_vector_norm(torch::cat(flat), p).item<double>();
}

// ---- Tied weights ---------------------------------------------------------------------------------------------------

TEST(Layouts, ATiedWeightCountsOnceInNormsAndIsScaledOnce) {
  Net net = reference(1), expected = reference(1);
  ASSERT_EQ(net->parameters().size(), 5u);  // the tied weight twice
  const double norm = norm_of(once(*expected));
  EXPECT_NEAR(clip_grad_norm_(net->parameters(), 1.0).item<double>(), norm, 1e-4 * norm);
  EXPECT_NEAR(norm_of(once(*net)), 1.0, 1e-4);
  Net by_module = reference(1);
  EXPECT_NEAR(clip_grad_norm_(*by_module, 1.0).item<double>(), norm, 1e-4 * norm);
  EXPECT_NEAR(norm_of(once(*by_module)), 1.0, 1e-4);
}

TEST(Layouts, ATiedWeightIsUnscaledOnce) {
  Net net = reference(1);
  const Tensor before = net->first->weight.grad().clone();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  GradScaler scaler({.init_scale = 4});
  scaler.unscale_(optimizer);
  EXPECT_TRUE(torch::equal(net->first->weight.grad() * 4, before));
}

TEST(Layouts, AccumulationScalesATiedWeightOnce) {
  Net net, expected;
  Accumulation accumulation(net->parameters(), 2);
  for (const int samples : {4, 2}) {
    const auto scope = accumulation.step();
    const Tensor x = batch(samples).narrow(0, 0, samples);
    accumulation.scale(loss_of(net(x)), samples).backward();
    (loss_of(expected(x)) * samples / 6).backward();
  }
  EXPECT_TRUE(torch::allclose(net->first->weight.grad(), expected->first->weight.grad(), 1e-4, 1e-5));
}

// ---- Norms ----------------------------------------------------------------------------------------------------------

class LayoutsOf : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, LayoutsOf, testing::Values(1, 2, 3));

TEST_P(LayoutsOf, NormsOfShardedParametersEqualOneProcess) {
  run_ranks({.n = GetParam()}, [](Rank& r) {
    for (const double p : {2.0, 1.0, kInfinity}) {
      const Net expected = reference(r.world->size());
      const double norm = norm_of(once(*expected), p);
      for (int how = 0; how < 3; ++how) {
        auto net = fully_shard(Net(), {.group = r.world});
        loss_of(net(batch(r.rank))).backward();
        const Tensor got = how == 0   ? clip_grad_norm_(net->parameters(), 1.0, {.norm_type = p})
                           : how == 1 ? clip_grad_norm_(*net, 1.0, {.norm_type = p})
                                      : clip_grad_norm_(net->parameters(), 1.0, {.norm_type = p, .group = r.world});
        EXPECT_NEAR(got.item<double>(), norm, 1e-4 * norm) << "p = " << p << ", " << how;
        const Tensor again = clip_grad_norm_(net->parameters(), kInfinity, {.norm_type = p});
        EXPECT_NEAR(again.item<double>(), 1.0, 1e-3) << "p = " << p << ", " << how;
      }
    }
  });
}

/// A block whose linear layers are divided, and whose norms and row bias are not.
TEST_P(LayoutsOf, NormsOfTensorParallelParametersAreThoseOfOneProcessAndKeepReplicatedWeightsEqual) {
  run_ranks({.n = GetParam()}, [](Rank& r) {
    const auto make = [](std::shared_ptr<ProcessGroup> group) {
      nn::ParallelTransformerBlock block(nn::ParallelBlockOptions{.width = 12, .heads = 3, .group = std::move(group)});
      const torch::NoGradGuard no_grad;
      int seed = 1;
      for (const auto& item : block->named_parameters()) {
        const TensorLayout layout = layout_of(item.value());
        const auto shape = layout.shard.shape.empty() ? item.value().sizes().vec() : layout.shard.shape;
        Tensor all = numbers(shape, seed++);
        for (std::size_t d = 0; d < layout.shard.offset.size() && !layout.shard.shape.empty(); ++d)
          all = all.narrow(static_cast<std::int64_t>(d), layout.shard.offset[d],
                           item.value().size(static_cast<std::int64_t>(d)));
        item.value().copy_(all);
      }
      return block;
    };
    auto alone = r.world->split(r.rank, 0);
    auto block = make(r.world), whole = make(alone);
    torch::optim::SGD ours(block->parameters(), 0.01), theirs(whole->parameters(), 0.01);
    for (int step = 0; step < 5; ++step) {
      const Tensor x = numbers({2, 3, 12}, 70 + step);
      ours.zero_grad(), theirs.zero_grad();
      (10 * block(x).pow(2).sum()).backward();
      (10 * whole(x).pow(2).sum()).backward();
      const double expected = clip_grad_norm_(whole->parameters(), 1.0).item<double>();
      const Tensor norm = step % 2 == 0 ? clip_grad_norm_(block->parameters(), 1.0) : clip_grad_norm_(*block, 1.0);
      EXPECT_NEAR(norm.item<double>(), expected, 2e-3 * expected) << "step " << step;
      ours.step(), theirs.step();
    }
    const auto reached = [](nn::ParallelTransformerBlock& one) { return one->norm1->weight.detach().clone(); };
    EXPECT_TRUE(torch::allclose(reached(block), reached(whole), 1e-4, 1e-5));
    Tensor of_rank_0 = reached(block);
    broadcast(of_rank_0, GroupRank{0}, {.group = r.world});
    EXPECT_TRUE(torch::equal(of_rank_0, reached(block)));
  });
}

TEST(Layouts, NormsOfATensorParallelModuleThatIsFullyShardedAddUpOverBothGroups) {
  run_ranks({.n = 4}, [](Rank& r) {
    const auto tensor = r.world->split(r.rank / 2, r.rank), shard = r.world->split(r.rank % 2, r.rank);
    torch::nn::Sequential layers(nn::ColumnParallelLinear(5, 6, nn::ColumnParallelOptions{.group = tensor}),
                                 nn::RowParallelLinear(6, 5, nn::RowParallelOptions{.group = tensor}));
    auto net = fully_shard(layers, {.group = shard, .init_sync = false});
    double expected = 0;
    for (const auto& item : net->named_parameters()) {
      const TensorLayout layout = layout_of(item.value());
      EXPECT_EQ(layout.divided_over.size(), item.key() == "1.bias" ? 1u : 2u) << item.key();
      item.value().mutable_grad() = torch::full_like(item.value(), 2.0);
      std::int64_t elements = 1;
      for (const auto extent : layout.shard.shape) elements *= extent;
      expected += 4.0 * static_cast<double>(elements);
    }
    EXPECT_NEAR(clip_grad_norm_(net->parameters(), kInfinity).item<double>(), std::sqrt(expected), 1e-4);
    EXPECT_NEAR(clip_grad_norm_(*net, kInfinity).item<double>(), std::sqrt(expected), 1e-4);
    auto whole = full_parameters(*net);
    EXPECT_EQ(whole[0].second.sizes(), torch::IntArrayRef({6, 5}));
    whole[0].second = numbers({6, 5}, 9);
    set_full_parameters(*net, whole);
    EXPECT_TRUE(torch::equal(full_parameters(*net)[0].second, whole[0].second));
  });
}

TEST_P(LayoutsOf, WholeParametersOfTensorParallelLayersAreGatheredAndDividedAgain) {
  run_ranks({.n = GetParam()}, [](Rank& r) {
    torch::nn::Sequential layers(nn::ColumnParallelLinear(3, 7, nn::ColumnParallelOptions{.group = r.world}),
                                 nn::RowParallelLinear(7, 2, nn::RowParallelOptions{.group = r.world}),
                                 nn::VocabParallelEmbedding(11, 2, nn::VocabParallelOptions{.group = r.world}));
    std::vector<std::pair<std::string, Tensor>> given;
    int seed = 1;
    for (const auto& [name, whole] : full_parameters(*layers)) given.emplace_back(name, numbers(whole.sizes(), seed++));
    set_full_parameters(*layers, given);
    const auto got = full_parameters(*layers);
    for (std::size_t i = 0; i < given.size(); ++i)
      EXPECT_TRUE(torch::equal(got[i].second, given[i].second)) << given[i].first;
    EXPECT_EQ(got[2].second.sizes(), torch::IntArrayRef({2, 7}));
    const auto of_rank_0 = full_parameters(*layers, 0);
    EXPECT_EQ(of_rank_0.size(), r.rank == 0 ? got.size() : 1u);  // the bias behind the row-parallel layer is whole
  });
}

/// Stages of one Linear each, all of them tied; the last rank's second stage has no parameters.
TEST_P(LayoutsOf, NormsOfAPipelineCountATiedWeightOnce) {
  run_ranks({.n = GetParam()}, [](Rank& r) {
    torch::nn::Linear linear(3, 3);
    const torch::NoGradGuard no_grad;
    linear->weight.fill_(1), linear->bias.fill_(0);
    std::optional<Pipeline> pipeline;
    pipeline.emplace(
        std::vector<torch::nn::AnyModule>{torch::nn::AnyModule(linear)},
        PipelineOptions{.loss = [](const Tensor& y, const Tensor&) { return y.mean(); },
                        .group = r.world,
                        .tied = r.world->size() > 1 ? NamedTensors{{"w", linear->weight}} : NamedTensors{}});
    linear->weight.mutable_grad() = torch::full({3, 3}, 2.0);
    linear->bias.mutable_grad() = torch::full({3}, 2.0);
    const double expected = std::sqrt(4.0 * (9 + 3 * r.world->size()));
    EXPECT_NEAR(clip_grad_norm_(pipeline->trained_parameters(), kInfinity).item<double>(), expected, 1e-5);
    EXPECT_NEAR(clip_grad_norm_(*pipeline, kInfinity).item<double>(), expected, 1e-5);
    EXPECT_NEAR(clip_grad_norm_(pipeline->parameters(), kInfinity, {.group = r.world}).item<double>(), expected, 1e-5);
    EXPECT_EQ(layout_of(linear->weight).kind, LayoutKind::pipeline_stage);
    pipeline.emplace(std::vector<torch::nn::AnyModule>{torch::nn::AnyModule(linear)},
                     PipelineOptions{.group = r.world});
    EXPECT_EQ(layout_of(linear->weight).divided_over.size(), 1u);  // of the second Pipeline alone
    pipeline.reset();
    EXPECT_FALSE(layout_of(linear->weight).divided());
  });
}

TEST(Layouts, ARankWithoutParametersTakesPartInTheNormOfAPipeline) {
  run_ranks({.n = 2}, [](Rank& r) {
    torch::nn::Linear linear(3, 3);
    Pipeline pipeline({r.rank == 0 ? torch::nn::AnyModule(linear) : torch::nn::AnyModule(torch::nn::Tanh())},
                      {.group = r.world});
    if (r.rank == 0) {
      linear->weight.mutable_grad() = torch::full({3, 3}, 2.0);
      linear->bias.mutable_grad() = torch::zeros({3});
    }
    EXPECT_NEAR(clip_grad_norm_(pipeline, kInfinity).item<double>(), 6, 1e-5);
    EXPECT_NEAR(clip_grad_norm_(pipeline.trained_parameters(), kInfinity, {.group = r.world}).item<double>(), 6, 1e-5);
  });
}

TEST(Layouts, AGroupThatDoesNotDivideTheParametersIsRefused) {
  run_ranks({.n = 2}, [](Rank& r) {
    const auto alone = r.world->split(r.rank, 0);
    auto net = fully_shard(Net(), {.group = r.world});
    loss_of(net(batch(r.rank))).backward();
    const std::string error = error_of([&] { clip_grad_norm_(net->parameters(), 1.0, {.group = alone}); });
    EXPECT_NE(error.find("does not divide the parameters"), std::string::npos) << error;
  });
}

// ---- GradScaler -----------------------------------------------------------------------------------------------------

TEST_P(LayoutsOf, RanksThatDivideParametersSkipTheSameSteps) {
  run_ranks({.n = GetParam()}, [](Rank& r) {
    auto net = fully_shard(Net(), {.group = r.world});
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    GradScaler scaler({.init_scale = 8});
    const auto whole = [&] { return full_parameters(*net).front().second; };
    const Tensor before = whole();
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      scaler.scale(loss_of(net(batch(r.rank)))).backward();
      if (step == 0 && r.rank == 0) net->parameters().front().grad().fill_(kInfinity);  // a row of rank 0 alone
      const bool taken = scaler.step(optimizer);
      scaler.update();
      EXPECT_EQ(taken, step == 1);
      EXPECT_EQ(torch::equal(whole(), before), step == 0);
      EXPECT_EQ(scaler.get_scale(), 4);
    }
  });
}

TEST(Layouts, RanksOfATensorParallelLayerSkipTheSameSteps) {
  run_ranks({.n = 2}, [](Rank& r) {
    nn::ColumnParallelLinear layer(3, 4, nn::ColumnParallelOptions{.group = r.world});
    torch::optim::SGD optimizer(layer->parameters(), 0.1);
    for (const Tensor& one : layer->parameters())
      one.mutable_grad() = torch::full_like(one, r.rank == 1 ? kInfinity : 1.0);
    GradScaler scaler({.init_scale = 8});
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4);
  });
}

// ---- Refused --------------------------------------------------------------------------------------------------------

void expect_refused(const std::string& function, const std::string& parameter, const std::function<void()>& call) {
  std::string error = "no error";
  try {
    call();
  } catch (const Error& thrown) {
    error = thrown.what();
  }
  EXPECT_NE(error.find(function), std::string::npos) << function << ": \"" << error << '"';
  EXPECT_NE(error.find(parameter), std::string::npos) << function << ": \"" << error << '"';
}

TEST(Layouts, ShardedParametersAreRefusedWhereWholeOnesAreExpected) {
  const SharedFolder folder;
  run_ranks({.n = 2, .env = folder.env()}, [&](Rank& r) {
    Net inside;
    auto net = fully_shard(inside, {.group = r.world});
    const auto before = full_parameters(*net);
    const std::string path = SharedFolder::here() + "/weights-" + std::to_string(r.rank) + ".safetensors";
    const auto alone = r.world->split(r.rank, 0);
    expect_refused("DistributedDataParallel", "head", [&] { DistributedDataParallel ddp(net, {.group = r.world}); });
    expect_refused("DistributedDataParallel", "head", [&] { DistributedDataParallel ddp(net, {.group = alone}); });
    expect_refused("DistributedDataParallel", "w",
                   [&] { GradientAverager averager({{"w", net->parameters().front()}}, {}, {.group = r.world}); });
    expect_refused("ShardedOptimizer", "parameter 0", [&] {
      ShardedOptimizer<torch::optim::SGD> optimizer(net->trained_parameters(), torch::optim::SGDOptions(0.1),
                                                    {.group = r.world});
    });
    expect_refused("PeriodicModelAverager", "parameter 0", [&] {
      PeriodicModelAverager averager({.group = r.world});
      averager.average_parameters(net->parameters());
    });
    expect_refused("save_weights", "head", [&] { save_weights(*net, path); });
    expect_refused("save_weights", "head", [&] { save_weights(*inside, path); });
    expect_refused("save_weights", "w", [&] { save_weights({{"w", net->parameters().front()}}, path); });
    expect_refused("load_weights", "head", [&] { load_weights(*net, path); });
    expect_refused("torch::save", "fully sharded", [&] { torch::save(net, path); });
    expect_refused("torch::save", "fully_shard", [&] { torch::save(inside, path); });
    EXPECT_FALSE(std::ifstream(path).good());
    const auto after = full_parameters(*net);
    for (std::size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(torch::equal(before[i].second, after[i].second)) << before[i].first;
  });
}

TEST(Layouts, TensorParallelAndPipelineParametersAreRefusedWhereWholeOnesAreExpected) {
  const SharedFolder folder;
  run_ranks({.n = 2, .env = folder.env()}, [&](Rank& r) {
    const std::string path = SharedFolder::here() + "/weights-" + std::to_string(r.rank) + ".safetensors";
    torch::nn::Sequential layers(nn::ColumnParallelLinear(3, 4, nn::ColumnParallelOptions{.group = r.world}),
                                 torch::nn::Linear(2, 2));
    expect_refused("DistributedDataParallel", "0.weight",
                   [&] { DistributedDataParallel ddp(layers, {.group = r.world}); });
    expect_refused("save_weights", "0.weight", [&] { save_weights(*layers, path); });
    expect_refused("load_weights", "0.weight", [&] { load_weights(*layers, path); });
    expect_refused("torch::save", "ColumnParallelLinear", [&] { torch::save(layers, path); });
    expect_refused("DataParallel", "0.weight", [&] {
      DataParallel<torch::nn::SequentialImpl> dp(layers.ptr(), {.devices = {torch::kCPU, torch::kCPU}});
    });
    const auto alone = r.world->split(r.rank, 0);
    const DistributedDataParallel orthogonal(layers, {.group = alone});  // another dimension of a mesh
    torch::nn::Linear linear(3, 3);
    Pipeline pipeline({torch::nn::AnyModule(linear)}, {.group = r.world});
    expect_refused("save_weights", "stage", [&] { save_weights(pipeline, path); });
    expect_refused("torch::save", "Pipeline", [&] {
      torch::serialize::OutputArchive archive;
      pipeline.save(archive);
    });
    expect_refused("DistributedDataParallel", "weight",
                   [&] { DistributedDataParallel ddp(linear, {.group = r.world}); });
    expect_refused("Pipeline", "data_group", [&] {
      Pipeline other({torch::nn::AnyModule(linear)}, {.group = r.world, .ddp = {.group = r.world}});
    });
    EXPECT_FALSE(std::ifstream(path).good());
  });
}

TEST(Layouts, OneRankHoldsAllOfADividedModuleAndSavesIt) {
  const SharedFolder folder;
  run_ranks({.n = 1, .env = folder.env()}, [&](Rank& r) {
    const std::string path = SharedFolder::here() + "/weights.safetensors";
    torch::nn::Sequential layers(nn::ColumnParallelLinear(3, 4, nn::ColumnParallelOptions{.group = r.world}));
    save_weights(*layers, path);
    EXPECT_TRUE(load_weights(*layers, path).complete());
    torch::save(layers, SharedFolder::here() + "/net.pt");
  });
}

// ---- Changes behind the wrapper -------------------------------------------------------------------------------------

struct NormedImpl : torch::nn::Cloneable<NormedImpl> {
  NormedImpl() { reset(); }
  void reset() override { norm = register_module("norm", torch::nn::BatchNorm1d(5)); }
  Tensor forward(const Tensor& x) { return norm(x); }
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Normed);

TEST(Layouts, BuffersAreBroadcastAfterALoadThroughTheWrapper) {
  const SharedFolder folder;
  run_ranks({.n = 2, .env = folder.env()}, [&](Rank& r) {
    Normed net;
    DistributedDataParallel ddp(net, {.group = r.world});
    const std::string path = SharedFolder::here() + "/ddp-" + std::to_string(r.rank) + ".pt";
    const auto step = [&] {
      ddp(batch(r.rank)).pow(2).sum().backward();
      Tensor of_rank_0 = net->norm->running_mean.clone();
      broadcast(of_rank_0, GroupRank{0}, {.group = r.world});
      EXPECT_TRUE(torch::equal(of_rank_0, net->norm->running_mean)) << net->norm->running_mean;
    };
    step();
    {
      torch::serialize::OutputArchive archive;
      ddp.save(archive);
      archive.save_to(path);
    }
    torch::serialize::InputArchive archive;
    archive.load_from(path);
    ddp.load(archive);
    step();
    step();
  });
}

TEST(Layouts, WeightsLoadedPastTheWrapperAreAveraged) {
  const SharedFolder folder;
  run_ranks({.n = 2, .env = folder.env()}, [&](Rank& r) {
    torch::nn::Linear net(5, 5);
    DistributedDataParallel ddp(net, {.group = r.world});
    loss_of(ddp(batch(r.rank))).backward();
    const std::string path = SharedFolder::here() + "/net-" + std::to_string(r.rank) + ".pt";
    torch::save(net, path);
    torch::load(net, path);
    for (Tensor& one : net->parameters()) one.mutable_grad() = Tensor();
    loss_of(ddp(batch(r.rank))).backward();
    Tensor of_rank_0 = net->weight.grad().clone();
    broadcast(of_rank_0, GroupRank{0}, {.group = r.world});
    EXPECT_TRUE(torch::equal(of_rank_0, net->weight.grad()));
  });
}

TEST(Layouts, AParameterThatIsFrozenAfterWrappingIsNamed) {
  run_ranks({.n = 2}, [](Rank& r) {
    torch::nn::Linear net(5, 5);
    DistributedDataParallel ddp(net, {.group = r.world});
    net->bias.set_requires_grad(false);
    const std::string error = error_of([&] { ddp(batch(r.rank)); });
    EXPECT_NE(error.find("parameter bias required a gradient when it was wrapped and requires none now"),
              std::string::npos)
        << error;
  });
}

}  // namespace
}  // namespace maniple::harness::layouts_test
