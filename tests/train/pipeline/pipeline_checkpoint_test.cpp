// Sharded checkpoints of pipelines and their optimizers: saved with one layout, loaded with another.
#include <set>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "harness/shared_folder.h"
#include "train/checkpoint/checkpoint_folder.h"
#include "train/checkpoint/saved_checkpoint.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::pipeline_checkpoint_test {
namespace {

namespace nn = torch::nn;

constexpr std::int64_t kRows = 8;
constexpr std::chrono::seconds kLimit(180);  // processes that load LibTorch take seconds to start on a busy machine

/// Its weight is the embedding's.
struct HeadImpl : nn::Module {
  explicit HeadImpl(const torch::Tensor& shared) : weight(register_parameter("weight", shared)) {}
  torch::Tensor forward(const torch::Tensor& x) { return x.matmul(weight.t()); }
  torch::Tensor weight;
};
TORCH_MODULE(Head);

nn::Sequential layers(int seed) {
  nn::Embedding embedding(16, 8);
  nn::Sequential all(embedding, nn::Linear(8, 12), nn::Tanh(), nn::Linear(12, 12), nn::Tanh(), nn::Linear(12, 8),
                     nn::BatchNorm1d(3), Head(embedding->weight));
  all->ptr(6)->eval();  // of which the buffers are saved; micro-batches do not change them
  fill(*all, seed);
  return all;
}
torch::Tensor tokens(int step) {
  return ((torch::arange(kRows * 3) * 7 + step) % 16).view({kRows, 3}).to(training_device());
}
torch::Tensor target(int step) { return numbers({kRows, 3, 16}, step); }
torch::Tensor mean_loss(const torch::Tensor& y, const torch::Tensor& t) { return (y - t).pow(2).mean(); }

struct Layout {
  int pipe = 1, data = 1;
  std::size_t stages_per_rank = 1;
  bool sharded_optimizer = false;  ///< over the data dimension
  int ranks() const { return pipe * data; }
  std::string text() const {
    return format_text("pipe {} x data {}, {} stages{}", pipe, data, stages_per_rank,
                       sharded_optimizer ? ", ShardedOptimizer" : "");
  }
};

/// Trains `steps` from the newest checkpoint in this folder of the shared one on, saves if asked to, and returns the
/// losses; none where the run did not take place, as in the ranks of another run.
std::vector<double> losses(const Layout& layout, const SharedFolder& shared, const std::string& folder, int steps,
                           bool save) {
  const auto run = run_ranks({.n = layout.ranks(), .limit = kLimit, .env = shared.env()}, [&](Rank& r) {
    const auto pipe = r.world->split(r.rank / layout.pipe), data = r.world->split(r.rank % layout.pipe);
    const auto cut = cut_into_stages(layers(3), {.group = pipe, .stages_per_rank = layout.stages_per_rank});
    Pipeline pipeline(cut.stages, {.micro_batches = 2,
                                   .schedule = PipelineSchedule::interleaved,
                                   .loss = mean_loss,
                                   .group = pipe,
                                   .data_group = layout.data > 1 ? data : nullptr,
                                   .tied = cut.tied});
    const auto options = torch::optim::AdamWOptions(0.05).weight_decay(0.1);
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (layout.sharded_optimizer) {
      optimizer = std::make_unique<ShardedOptimizer<optim::AdamW>>(pipeline.trained_parameters(), options,
                                                                   ShardingOptions{.group = data});
    } else {
      optimizer = std::make_unique<torch::optim::AdamW>(pipeline.trained_parameters(), options);
    }
    Checkpoint checkpoint(
        {.folder = SharedFolder::here() + "/" + folder, .background = false, .sharded = true, .group = r.world});
    checkpoint.add("model", pipeline).add("optimizer", *optimizer);
    const auto begin = static_cast<int>(checkpoint.load().value_or(0));
    for (int step = begin; step < begin + steps; ++step) {
      optimizer->zero_grad();
      double loss = pipeline.step(shard(tokens(step), r.rank / layout.pipe, layout.data),
                                  shard(target(step), r.rank / layout.pipe, layout.data));
      data->all_reduce(buffer_of(loss), ReduceOp::avg);
      optimizer->step();
      r.report(format_text("loss {}", step - begin), format_text("{:a}", loss));  // all bits
    }
    if (!save) return;
    checkpoint.save(begin + steps);
    EXPECT_EQ(checkpoint.last_error(), "");
  });
  std::vector<double> result;
  for (int step = 0; run && step < steps; ++step) result.push_back(run.numbers(format_text("loss {}", step))[0]);
  return result;
}

/// The same of the undivided model in one process, the parent.
std::vector<double> undivided(const std::string& folder, int steps, bool save, bool sharded) {
  if (is_child()) return {};
  nn::Sequential model = layers(3);
  std::vector<torch::Tensor> parameters;
  std::set<const void*> seen;
  for (const auto& parameter : model->parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) parameters.push_back(parameter);
  }
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(0.05).weight_decay(0.1));
  Checkpoint checkpoint({.folder = folder, .background = false, .sharded = sharded});
  checkpoint.add("model", *model).add("optimizer", optimizer);
  const auto begin = static_cast<int>(checkpoint.load().value_or(0));
  std::vector<double> result;
  for (int step = begin; step < begin + steps; ++step) {
    optimizer.zero_grad();
    const auto loss = mean_loss(model->forward(tokens(step)), target(step));
    loss.backward();
    optimizer.step();
    result.push_back(loss.item<double>());
  }
  if (save) checkpoint.save(begin + steps);
  EXPECT_EQ(checkpoint.last_error(), "");
  return result;
}

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected, const std::string& what) {
  if (is_child()) return;
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-4) << what << ", step " << i;
}

TEST(PipelineCheckpoint, GoesOnWithTheSameBits) {
  for (const Layout& layout : {Layout{2}, Layout{2, 1, 2}, Layout{2, 2}, Layout{2, 2, 1, true}}) {
    const SharedFolder shared;
    const auto straight = losses(layout, shared, "straight", 4, false);
    std::vector<double> halves = losses(layout, shared, "halves", 2, true);
    for (const double loss : losses(layout, shared, "halves", 2, false)) halves.push_back(loss);
    expect_near(halves, straight, layout.text());
    if (test_device().is_cpu()) {  // a GPU may choose another kernel for the same step
      EXPECT_EQ(halves, straight) << layout.text();
    }
  }
}

TEST(PipelineCheckpoint, AnyOtherLayoutLoadsIt) {
  const SharedFolder shared;
  std::vector<double> after = undivided(SharedFolder::here() + "/none", 4, false, false);
  after.erase(after.begin(), after.begin() + (is_child() ? 0 : 2));
  std::vector<Layout> layouts = {{2}, {4}, {2, 1, 2}, {1}, {2, 2}, {2, 2, 1, true}};
  if (!test_device().is_cpu()) layouts = {{2}, {4}, {2, 2, 1, true}};  // processes take long to start
  for (const Layout& from : {Layout{2}, Layout{4}, Layout{2, 2, 1, true}}) {
    const std::string folder = from.text();
    losses(from, shared, folder, 2, true);
    for (const Layout& to : layouts)
      expect_near(losses(to, shared, folder, 2, false), after, from.text() + " to " + to.text());
    for (const bool sharded : {true, false})
      expect_near(undivided(SharedFolder::here() + "/" + folder, 2, false, sharded), after,
                  from.text() + " to one process");
  }
  undivided(SharedFolder::here() + "/whole", 2, true, true);
  expect_near(losses({2}, shared, "whole", 2, false), after, "one process to two stages");
}

TEST(PipelineCheckpoint, StagesMadeByHandMayHaveNamesInCommon) {
  const SharedFolder shared;
  run_ranks({.n = 2, .limit = kLimit, .env = shared.env()}, [&](Rank& r) {
    const std::string folder = SharedFolder::here();
    nn::Linear stage(4, 4);
    fill(*stage, r.rank);
    Pipeline pipeline({nn::AnyModule(stage)}, {.micro_batches = 2, .loss = mean_loss, .group = r.world});
    torch::optim::AdamW optimizer(pipeline.trained_parameters(), 0.1);
    const auto x = numbers({4, 4}, 1), t = numbers({4, 4}, 2);
    pipeline.step(x, t);
    optimizer.step();
    Checkpoint checkpoint({.folder = folder, .background = false, .sharded = true, .group = r.world});
    checkpoint.add("model", pipeline).add("optimizer", optimizer);
    checkpoint.save(1);
    EXPECT_EQ(checkpoint.last_error(), "");
    const torch::Tensor saved = stage->weight.detach().clone();
    pipeline.zero_grad();
    const double next = pipeline.step(x, t);
    optimizer.step();
    const torch::Tensor stepped = stage->weight.detach().clone();
    EXPECT_EQ(checkpoint.load(), std::optional<std::int64_t>(1));
    EXPECT_TRUE(stage->weight.equal(saved));
    pipeline.zero_grad();
    EXPECT_NEAR(pipeline.step(x, t), next, test_device().is_cpu() ? 0 : 1e-5);
    optimizer.step();
    const bool same = test_device().is_cpu() ? stage->weight.equal(stepped)
                                             : torch::allclose(stage->weight.detach(), stepped, 1e-5, 1e-5);
    EXPECT_TRUE(same) << "with the state of rank " << r.rank;

    // Rank 0 alone would save its own stage, and the others' would be lost.
    Checkpoint alone({.folder = folder + "/alone", .group = r.world});
    const Caught caught = catch_error([&] { alone.add("model", pipeline); });
    EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
    EXPECT_NE(caught.text.find(format_text("stage{}.", 1 - r.rank)), std::string::npos) << caught.text;
    const auto own = r.world->split(r.rank);
    Checkpoint apart({.folder = format_text("{}/{}", folder, r.rank), .background = false, .group = own});
    apart.add("model", pipeline).add("optimizer", optimizer);
    apart.save(1);
    EXPECT_EQ(apart.load(), std::optional<std::int64_t>(1));
  });
  const std::string folder = SharedFolder::here();
  const SavedCheckpoint saved(folder + "/" + checkpoint_name(1), read_manifest(folder, 1));
  const auto& tensors = saved.index().parts.at("optimizer").tensors;
  EXPECT_EQ(tensors.count("group.0.parameter.model/stage0.weight.exp_avg"), 1u);
  EXPECT_EQ(tensors.count("group.0.parameter.model/stage1.weight.exp_avg"), 1u);
}

TEST(PipelineCheckpoint, AParameterMissingFromTheCheckpointIsNamed) {
  const TemporaryDirectory folder;
  nn::Linear saved_model(3, 2);
  saved_model->to(training_device());
  torch::optim::AdamW optimizer(saved_model->parameters(), 0.1);
  torch::optim::AdamW without_bias({saved_model->weight}, 0.1);
  for (auto& parameter : saved_model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  without_bias.step();
  Checkpoint before({.folder = folder.path(), .background = false, .sharded = true});
  before.add("model", *saved_model).add("optimizer", without_bias);
  before.save(1);
  Checkpoint after({.folder = folder.path(), .sharded = true});
  after.add("model", *saved_model).add("optimizer", optimizer);
  const Caught caught = catch_error([&] { after.load(); });
  EXPECT_NE(caught.text.find("has no parameter model/bias"), std::string::npos) << caught;
}

}  // namespace
}  // namespace maniple::harness::pipeline_checkpoint_test
