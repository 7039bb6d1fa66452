// Every strategy of a Trainer against one process that trains on all batches: the same losses, norms and parameters up
// to rounding, checkpoints that load everywhere, and the same bits after an interruption.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "comm/base/format.h"
#include "harness/error_of.h"
#include "harness/run_ranks.h"
#include "harness/temporary_directory.h"
#include "train/models.h"
#include <maniple/comm/mesh.h>
#include <maniple/train/optim.h>
#include <maniple/train/tensor_parallel.h>
#include <maniple/train/trainer.h>

namespace maniple::harness::trainer_strategy_test {
namespace {

using testing_models::numbers;
using testing_models::shard;
using Example = torch::data::Example<>;

// ---- The strategies ------------------------------------------------------------------------------------------------

/// What a rank needs to know of the strategy that it takes part in.
struct Place {
  Strategy strategy = strategy::DataParallel{};
  int data_rank = 0, data_ranks = 1;
  std::shared_ptr<ProcessGroup> tensor = nullptr;  ///< of tensor-parallel layers
  std::shared_ptr<ProcessGroup> world = nullptr;
  int ranks() const { return world ? world->size() : 1; }
};

struct Layout {
  std::string name;
  int ranks;
  std::function<Place(Rank&)> setup;
};

Place data_parallel(Rank& r) {
  return {strategy::DataParallel{.ddp = {.group = r.world}}, r.rank, r.size, nullptr, r.world};
}
Place zero1(Rank& r) { return {strategy::Zero1{.ddp = {.group = r.world}}, r.rank, r.size, nullptr, r.world}; }
Place fully_sharded(Rank& r) {
  return {strategy::FullySharded{.shard = {.group = r.world}}, r.rank, r.size, nullptr, r.world};
}
Place tensor_parallel(Rank& r) { return {strategy::TensorParallel{.group = r.world}, 0, 1, r.world, r.world}; }
Place pipeline(Rank& r) { return {strategy::Pipeline{.micro_batches = 3, .group = r.world}, 0, 1, nullptr, r.world}; }
Place hybrid_sharded(Rank& r) {
  const DeviceMesh mesh(r.world, {{"replica", 2}, {"shard", 2}});
  return {
      strategy::FullySharded{.shard = {.group = mesh["shard"], .replicate_group = mesh["replica"]}, .world = r.world},
      r.rank, r.size, nullptr, r.world};
}
Place sharded_and_tensor(Rank& r) {
  const DeviceMesh mesh(r.world, {{"shard", r.size / 2}, {"tensor", 2}});
  return {strategy::FullySharded{.shard = {.group = mesh["shard"]}, .tensor_group = mesh["tensor"], .world = r.world},
          mesh.coordinate("shard"), r.size / 2, mesh["tensor"], r.world};
}
Place hybrid_sharded_and_tensor(Rank& r) {
  const DeviceMesh mesh(r.world, {{"replica", 2}, {"shard", 2}, {"tensor", 2}});
  return {strategy::FullySharded{.shard = {.group = mesh["shard"], .replicate_group = mesh["replica"]},
                                 .tensor_group = mesh["tensor"],
                                 .world = r.world},
          2 * mesh.coordinate("replica") + mesh.coordinate("shard"), 4, mesh["tensor"], r.world};
}
Place tensor_and_data(Rank& r) {
  const DeviceMesh mesh(r.world, {{"data", 2}, {"tensor", 2}});
  return {strategy::TensorParallel{.group = mesh["tensor"], .data_group = mesh["data"], .world = r.world},
          mesh.coordinate("data"), 2, mesh["tensor"], r.world};
}
Place pipeline_and_data(Rank& r) {
  const DeviceMesh mesh(r.world, {{"data", 2}, {"pipe", 2}});
  return {strategy::Pipeline{.micro_batches = 2, .group = mesh["pipe"], .data_group = mesh["data"], .world = r.world},
          mesh.coordinate("data"), 2, nullptr, r.world};
}
Place interleaved(Rank& r) {
  return {strategy::Pipeline{
              .micro_batches = 4, .schedule = PipelineSchedule::interleaved, .stages_per_rank = 2, .group = r.world},
          0, 1, nullptr, r.world};
}

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all = {
      {"data", 2, data_parallel},
      {"data", 3, data_parallel},
      {"zero1", 2, zero1},
      {"zero1", 3, zero1},
      {"fully sharded", 2, fully_sharded},
      {"fully sharded", 3, fully_sharded},
      {"tensor", 2, tensor_parallel},
      {"tensor", 3, tensor_parallel},
      {"pipeline", 2, pipeline},
      {"pipeline", 3, pipeline},
      {"fully sharded x tensor", 4, sharded_and_tensor},
  };
  return all;
}
const std::vector<Layout>& meshes() {
  static const std::vector<Layout> all = {{"hybrid sharded", 4, hybrid_sharded},
                                          {"fully sharded x tensor", 6, sharded_and_tensor},
                                          {"hybrid sharded x tensor", 8, hybrid_sharded_and_tensor},
                                          {"tensor x data", 4, tensor_and_data},
                                          {"pipeline x data", 4, pipeline_and_data},
                                          {"interleaved pipeline", 2, interleaved}};
  return all;
}

// ---- The model -----------------------------------------------------------------------------------------------------

struct AffineImpl : torch::nn::Module {
  AffineImpl(const torch::Tensor& shared, std::int64_t outputs)
      : weight(register_parameter("weight", shared)), bias(register_parameter("bias", torch::zeros({outputs}))) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(x, weight, bias); }
  torch::Tensor weight, bias;
};
TORCH_MODULE(Affine);

struct Job {
  std::string name = "plain";
  std::function<void(TrainerOptions&)> change = [](TrainerOptions&) {};
  bool tied = false, frozen = false, keeps_results = false, scales = false, evaluates = false, adam = false;
  torch::ScalarType dtype = torch::kFloat64;
  double tolerance = 1e-9;
};

torch::nn::Sequential make_net(const Job& job, const std::shared_ptr<ProcessGroup>& tensor) {
  namespace nn = torch::nn;
  nn::Sequential net;
  if (tensor) {
    net->push_back(maniple::nn::ColumnParallelLinear(8, 12, maniple::nn::ColumnParallelOptions{.group = tensor}));
    net->push_back(nn::Tanh());
    net->push_back(maniple::nn::RowParallelLinear(12, 12, maniple::nn::RowParallelOptions{.group = tensor}));
  } else {
    net->push_back(nn::Linear(8, 12));
    net->push_back(nn::Tanh());
    net->push_back(nn::Linear(12, 12));
  }
  const torch::Tensor middle = torch::zeros({12, 12}, job.dtype);
  net->push_back(Affine(middle, 12));
  if (job.dtype == torch::kFloat64) {
    net->push_back(nn::LayerNorm(nn::LayerNormOptions({12})));
  } else {
    net->push_back(nn::Tanh());  // LibTorch 1.13 has no LayerNorm of bfloat16 with float32 weights on the CPU
  }
  net->push_back(Affine(job.tied ? middle : torch::zeros({12, 12}, job.dtype), 12));
  net->push_back(nn::Tanh());
  net->push_back(nn::Linear(12, 4));
  net->to(job.dtype);
  return net;
}

/// The values of a whole net on every rank, whatever part of it the rank has.
void fill(torch::nn::Sequential& net, const Job& job, int seed) {
  const torch::NoGradGuard no_grad;
  torch::nn::Sequential whole = make_net(job, nullptr);
  std::map<const void*, torch::Tensor> seen;
  for (const auto& item : whole->named_parameters()) {
    if (seen.emplace(item.value().unsafeGetTensorImpl(), item.value()).second)
      item.value().copy_(numbers(item.value().sizes(), seed++) * 0.5);
  }
  const auto named = whole->named_parameters();
  for (const auto& child : net->named_children()) {
    const auto* divided = dynamic_cast<const ShardedModule*>(child.value().get());
    for (const auto& item : child.value()->named_parameters()) {
      torch::Tensor value = named[child.key() + "." + item.key()];
      if (const auto part = divided != nullptr ? divided->shard_of(item.key()) : std::nullopt) {
        for (std::int64_t d = 0; d < value.dim(); ++d)
          value = value.narrow(d, part->offset[static_cast<std::size_t>(d)], item.value().size(d));
      }
      item.value().copy_(value);
    }
  }
  if (!job.frozen) return;
  for (auto& item : net->named_parameters()) {
    if (item.key() == "3.weight" || item.key() == "4.bias") item.value().set_requires_grad(false);
  }
}

// ---- A training ----------------------------------------------------------------------------------------------------

constexpr std::int64_t kRows = 12;  // of all ranks; 2 and 3 divide it
constexpr int kBatches = 5;

std::vector<Example> batches_of(const Place& setup, const Job& job, int seed) {
  std::vector<Example> batches;
  for (int i = 0; i < kBatches; ++i) {
    const auto part = [&](std::int64_t width, int own_seed) {
      return shard(numbers({kRows, width}, own_seed).to(job.dtype), setup.data_rank, setup.data_ranks).contiguous();
    };
    batches.emplace_back(part(8, seed + i), part(4, seed + i + 100));
    // The last rows are on the last rank.
    if (job.scales && i == 2 && setup.data_rank + 1 == setup.data_ranks)
      batches.back().target[-1][0] = std::numeric_limits<double>::infinity();
  }
  return batches;
}

struct Curve {
  std::vector<double> numbers;  ///< of all rows
  std::map<std::string, torch::Tensor> weights;
  TrainerState end;
};

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Job& job, torch::nn::Module& net) {
  std::vector<torch::Tensor> parameters;
  for (const torch::Tensor& parameter : net.parameters()) {
    bool is_new = true;
    for (const torch::Tensor& one : parameters) is_new = is_new && !one.is_same(parameter);
    if (is_new) parameters.push_back(parameter);
  }
  if (job.adam) return std::make_unique<optim::AdamW>(parameters, torch::optim::AdamWOptions(0.02));
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}

/// Whole parameters, read from the newest checkpoint by this process alone, as any other layout would.
std::map<std::string, torch::Tensor> saved_weights(const Job& job, const std::string& folder) {
  torch::nn::Sequential net = make_net(job, nullptr);
  Checkpoint checkpoint({.folder = folder});
  checkpoint.add("model", *net);
  checkpoint.load({});
  std::map<std::string, torch::Tensor> result;
  for (const auto& item : net->named_parameters()) result[item.key()] = item.value().detach().clone();
  for (const auto& item : net->named_buffers()) result[item.key()] = item.value().clone();
  return result;
}

Curve train(const Place& setup, const Job& job, const std::string& folder, std::size_t epochs = 2,
            std::int64_t crash_at = 0) {
  torch::nn::Sequential net = make_net(job, setup.tensor);
  const int own_seed = setup.world && !setup.tensor ? setup.world->rank() : 0;  // the Trainer makes them rank 0's
  fill(net, job, 1 + own_seed);
  const auto optimizer = make_optimizer(job, *net);
  GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
  Curve curve;
  std::vector<torch::Tensor> kept;
  TrainerOptions options{
      .epochs = epochs,
      .lr = [](std::int64_t step, double base) { return base / (1 + 0.1 * static_cast<double>(step)); },
      .checkpoint = {.folder = folder, .background = false},
      .evaluate_every = job.evaluates ? 2 : 0,
      .graceful_stop = false,
      .log_every = 1,
      .progress = false,
      .strategy = setup.strategy};
  job.change(options);
  options.on_step = [&](const TrainerState& state) {
    for (const char* name : {"loss", "output", "grad_norm"}) {
      curve.numbers.push_back(state.train.value_or(name, 0));
      curve.numbers.push_back(state.evaluation.value_or(name, 0));
    }
    if (crash_at > 0 && state.step == crash_at) throw std::runtime_error("on purpose");
  };
  Trainer trainer(net, *optimizer, options);
  if (job.scales) trainer.use(scaler);
  const auto loss = criterion([&](const torch::Tensor& output, const torch::Tensor& target, Metrics& metrics) {
    metrics.add("output", output.detach().to(torch::kFloat64).mean(), static_cast<double>(output.size(0)));
    const torch::Tensor result = torch::mse_loss(output.to(target.scalar_type()), target);
    if (job.keeps_results) kept.push_back(result);
    return result;
  });
  const std::vector<Example> train = batches_of(setup, job, 1), test = batches_of(setup, job, 50);
  curve.end = job.evaluates ? trainer.fit(train, test, loss) : trainer.fit(train, loss);
  if (job.evaluates) {
    const MetricRow row = trainer.evaluate(test, loss);
    curve.numbers.push_back(row["loss"]);
    EXPECT_EQ(row.at("loss").count, kBatches * kRows);
  }
  if (job.scales) curve.numbers.push_back(scaler.get_scale());
  return curve;
}

void expect_close(const Curve& a, const Curve& b, double tolerance) {
  EXPECT_EQ(a.end.step, b.end.step);
  EXPECT_EQ(a.end.samples, b.end.samples);
  ASSERT_EQ(a.numbers.size(), b.numbers.size());
  for (std::size_t i = 0; i < a.numbers.size(); ++i) {
    if (!std::isfinite(b.numbers[i])) continue;
    EXPECT_NEAR(a.numbers[i], b.numbers[i], tolerance * (1 + std::abs(b.numbers[i]))) << i;
  }
  ASSERT_EQ(a.weights.size(), b.weights.size());
  for (const auto& [name, weight] : b.weights)
    EXPECT_LE((a.weights.at(name) - weight).abs().max().item<double>(), tolerance) << name;
}

/// The largest distance by which training moved a weight. Tolerances must be small compared with it.
double moved(const Curve& trained, const Job& job) {
  torch::nn::Sequential begin = make_net(job, nullptr);
  fill(begin, job, 1);
  double most = 0;
  for (const auto& item : begin->named_parameters())
    most = std::max(most, (trained.weights.at(item.key()) - item.value().detach()).abs().max().item<double>());
  return most;
}

/// Trains with the layout, and compares with one process.
void compare(const Layout& layout, const Job& job) {
  SCOPED_TRACE(format_text("{} over {} ranks, {}", layout.name, layout.ranks, job.name));
  const TemporaryDirectory folders;
  Curve alone = train({}, job, folders.path() + "/alone");
  alone.weights = saved_weights(job, folders.path() + "/alone");
  EXPECT_GT(moved(alone, job), 5 * job.tolerance);
  run_ranks({.n = layout.ranks}, [&](Rank& r) {
    const Place setup = layout.setup(r);
    const std::string folder = folders.path() + "/ranks";
    Curve curve = train(setup, job, folder);
    r.world->barrier();
    curve.weights = saved_weights(job, folder);
    expect_close(curve, alone, job.tolerance);
  });
}

std::vector<Job> jobs() {
  return {
      {},
      {.name = "accumulation", .change = [](TrainerOptions& options) { options.accumulate = 2; }},
      {.name = "clipping", .change = [](TrainerOptions& options) { options.max_grad_norm = 0.05; }},
      {.name = "scaler", .scales = true},
      {.name = "scaler, accumulation and clipping",
       .change =
           [](TrainerOptions& options) {
             options.accumulate = 2;
             options.max_grad_norm = 0.05;
           },
       .scales = true},
      {.name = "autocast",
       .change =
           [](TrainerOptions& options) { options.autocast = [] { return std::make_shared<Autocast>(torch::kCPU); }; },
       .dtype = torch::kFloat32,
       .tolerance = 5e-2},  // bfloat16: 0.018 with LibTorch 1.13, 0.022 with 2.11
      {.name = "frozen parameters", .frozen = true},
      {.name = "tied weights", .change = [](TrainerOptions& options) { options.max_grad_norm = 0.05; }, .tied = true},
      {.name = "results kept alive", .keeps_results = true},
      {.name = "evaluation between steps", .evaluates = true},
      {.name = "AdamW", .adam = true},
  };
}

class TrainerStrategyMatrix : public testing::TestWithParam<std::size_t> {};
TEST_P(TrainerStrategyMatrix, EqualsOneProcess) {
  for (const Layout& layout : layouts()) {
    compare(layout, jobs()[GetParam()]);
  }
}
INSTANTIATE_TEST_SUITE_P(Jobs, TrainerStrategyMatrix, testing::Range<std::size_t>(0, jobs().size()));

TEST(TrainerStrategy, MeshesEqualOneProcess) {
  for (const Layout& layout : meshes()) {
    for (const std::size_t job : {0, 4, 9}) compare(layout, jobs()[job]);
  }
}

// ---- Checkpoints ---------------------------------------------------------------------------------------------------

/// Each layout goes on from the checkpoint of the one before it, on another number of ranks, and saves one for the
/// next.
void go_on_in_turn(const std::vector<Layout>& chain) {
  const Job job{.name = "resume", .adam = true};
  const TemporaryDirectory folders;
  const std::string folder = folders.path() + "/ranks";
  Curve alone = train({}, job, folders.path() + "/alone", chain.size() + 1);
  alone.weights = saved_weights(job, folders.path() + "/alone");
  for (std::size_t i = 0; i < chain.size(); ++i) {
    SCOPED_TRACE(format_text("epoch {} with {} over {} ranks", i, chain[i].name, chain[i].ranks));
    run_ranks({.n = chain[i].ranks}, [&](Rank& r) {
      EXPECT_EQ(train(chain[i].setup(r), job, folder, i + 1).end.step, static_cast<std::int64_t>(i + 1) * kBatches);
    });
  }
  Curve last = train({}, job, folder, chain.size() + 1);
  EXPECT_EQ(last.numbers.size(), alone.numbers.size() / (chain.size() + 1)) << "one epoch";
  last.numbers = alone.numbers;
  last.weights = saved_weights(job, folder);
  expect_close(last, alone, job.tolerance);
}

TEST(TrainerStrategy, EveryLayoutLoadsTheCheckpointsOfEveryOther) {
  const Layout data{"data", 2, data_parallel}, zero{"zero1", 3, zero1}, sharded{"fully sharded", 2, fully_sharded},
      tensor{"tensor", 3, tensor_parallel}, stages{"pipeline", 2, pipeline},
      both{"fully sharded x tensor", 4, sharded_and_tensor};
  go_on_in_turn({data, zero, sharded, tensor, stages, data});
  go_on_in_turn({both, tensor, both, zero, both, data});
  go_on_in_turn({stages, tensor, sharded, zero, data, sharded, stages, zero, tensor, data, tensor, zero, stages,
                 sharded, data, stages});
}

TEST(TrainerStrategy, GoesOnAfterACrashWithTheSameBits) {
  const Job job{.name = "crash", .change = [](TrainerOptions& options) { options.save_every = 2; }, .adam = true};
  std::vector<Layout> all = layouts();
  all.insert(all.end(), meshes().begin(), meshes().end());
  for (const Layout& layout : all) {
    SCOPED_TRACE(format_text("{} over {} ranks", layout.name, layout.ranks));
    const TemporaryDirectory folders;
    run_ranks({.n = layout.ranks}, [&](Rank& r) {
      const Place setup = layout.setup(r);
      const std::size_t rows = train(setup, job, folders.path() + "/straight").numbers.size();
      EXPECT_THROW(train(setup, job, folders.path() + "/crash", 2, 7), std::runtime_error);
      EXPECT_EQ(train(setup, job, folders.path() + "/crash").numbers.size(), rows * 4 / 10)
          << "it goes on after step 6";
      r.world->barrier();
      const auto straight = saved_weights(job, folders.path() + "/straight");
      for (const auto& [name, weight] : saved_weights(job, folders.path() + "/crash"))
        EXPECT_TRUE(weight.equal(straight.at(name))) << name;
    });
  }
}

}  // namespace
}  // namespace maniple::harness::trainer_strategy_test
