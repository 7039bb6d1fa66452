// Trainer against loops that are written by hand, on one rank and more: the same bits, also after an interruption.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <fstream>
#include <map>
#include <optional>

#include <nlohmann/json.hpp>

#include "comm/base/files.h"
#include "comm/base/format.h"
#include "harness/error_of.h"
#include "harness/run_ranks.h"
#include "harness/temporary_directory.h"
#include "train/checkpoint/checkpoint_folder.h"
#include "train/models.h"
#include <maniple/train/clip_grad.h>
#include <maniple/train/trainer.h>

namespace maniple::harness::trainer_test {
namespace {

using testing_models::Net;
using testing_models::numbers;

struct Points : torch::data::datasets::Dataset<Points> {
  explicit Points(std::int64_t count) : data(numbers({count, 8}, 3)), targets(numbers({count, 4}, 4)) {}
  torch::data::Example<> get(std::size_t index) override {
    return {data[static_cast<std::int64_t>(index)], targets[static_cast<std::int64_t>(index)]};
  }
  torch::optional<std::size_t> size() const override { return static_cast<std::size_t>(data.size(0)); }
  torch::Tensor data, targets;
};

/// Who trains: a rank of a group, or a process without one.
struct Who {
  std::shared_ptr<ProcessGroup> group;
  int rank() const { return group ? group->rank() : 0; }
  int size() const { return group ? group->size() : 1; }
};

/// On 1, 2 and 3 ranks that are threads, and without a group.
void for_all(const std::function<void(const Who&)>& body) {
  body({nullptr});
  for (const int n : {1, 2, 3}) {
    SCOPED_TRACE(n);
    run_ranks({.n = n}, [&](Rank& r) { body({r.world}); });
  }
}

constexpr std::size_t kBatch = 2, kEpochs = 3;
constexpr int kAccumulate = 2;
constexpr double kRate = 0.1, kNorm = 0.3;

double rate_at(std::int64_t step, double base) { return base / (1 + 0.1 * static_cast<double>(step)); }

/// All that a program has besides its loop. Each rank takes 5 batches of 2 in an epoch, the last of which is a step by
/// itself.
struct Job {
  explicit Job(const Who& who, int seed = 1)
      : sampler(static_cast<std::size_t>(10 * who.size()),
                {.num_replicas = who.size(), .rank = who.rank(), .shuffle = true, .seed = 5}),
        loader(torch::data::make_data_loader(Points(10 * who.size()).map(torch::data::transforms::Stack<>()), sampler,
                                             torch::data::DataLoaderOptions().batch_size(kBatch))) {
    testing_models::fill(*net, seed);
  }
  auto loss() {
    return [this](auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); };
  }
  Net net{16, true};
  torch::optim::SGD optimizer{net->parameters(), torch::optim::SGDOptions(kRate).momentum(0.9)};
  DistributedSampler sampler;
  decltype(torch::data::make_data_loader(Points(1).map(torch::data::transforms::Stack<>()),
                                         std::declval<DistributedSampler>(), torch::data::DataLoaderOptions())) loader;
};

TrainerOptions options_of(const Who& who) {
  TrainerOptions options{.epochs = kEpochs,
                         .accumulate = kAccumulate,
                         .max_grad_norm = kNorm,
                         .lr = rate_at,
                         .graceful_stop = false,  // one for a process, and these ranks are threads
                         .progress = false};
  options.strategy = strategy::DataParallel{.ddp = {.group = who.group}};
  return options;
}

struct Curve {
  std::vector<float> losses;  ///< of the last batch of each step
  std::vector<torch::Tensor> bits;

  void end(const Net& net) {
    for (const auto& tensor : net->parameters()) bits.push_back(tensor.detach().clone());
    for (const auto& tensor : net->buffers()) bits.push_back(tensor.clone());
  }
};

void expect_same(const Curve& a, const Curve& b) {
  EXPECT_EQ(a.losses, b.losses);
  ASSERT_EQ(a.bits.size(), b.bits.size());
  for (std::size_t i = 0; i < a.bits.size(); ++i) EXPECT_TRUE(a.bits[i].equal(b.bits[i])) << "tensor " << i;
}

Curve by_hand(const Who& who) {
  Job job(who);
  Curve curve;
  std::optional<DistributedDataParallel<Net>> ddp;
  if (who.group) ddp.emplace(job.net, DdpOptions{.group = who.group});
  std::int64_t step = 0;
  for (std::size_t epoch = 0; epoch < kEpochs; ++epoch) {
    job.sampler.set_epoch(epoch);
    int i = 0;
    for (auto& batch : *job.loader) {
      const bool alone = i == 4;
      const bool steps = i % 2 == 1 || alone;
      if (i++ % 2 == 0) job.optimizer.zero_grad();
      const auto loss = torch::mse_loss(job.net->forward(batch.data), batch.target);
      if (ddp && !steps) {
        const auto guard = ddp->no_sync();
        (loss / 2).backward();
      } else {
        (alone ? loss : loss / 2).backward();
      }
      if (!steps) continue;
      clip_grad_norm_(job.net->parameters(), kNorm);
      job.optimizer.param_groups()[0].options().set_lr(rate_at(step++, kRate));
      job.optimizer.step();
      curve.losses.push_back(loss.item<float>());
    }
  }
  curve.end(job.net);
  return curve;
}

Curve by_trainer(const Who& who, TrainerOptions options, TrainerState* end = nullptr) {
  Job job(who, 1 + who.rank());  // DistributedDataParallel makes them rank 0's
  Curve curve;
  const auto hook = options.on_step;
  options.on_step = [&](const TrainerState& state) {
    curve.losses.push_back(state.loss.item<float>());
    if (hook) hook(state);
  };
  Trainer trainer(job.net, job.optimizer, options);
  const TrainerState& state = trainer.fit(sampled(*job.loader, job.sampler), job.loss());
  if (end != nullptr) *end = state;
  curve.end(job.net);
  return curve;
}

TEST(Trainer, TheCurveOfALoopWrittenByHand) {
  for_all([](const Who& who) {
    TrainerState end;
    const Curve curve = by_trainer(who, options_of(who), &end);
    expect_same(curve, by_hand(who));
    EXPECT_EQ(curve.losses.size(), 9U);
    EXPECT_EQ(end.end, TrainerEnd::epochs);
    EXPECT_EQ(end.step, 9);
    EXPECT_EQ(end.samples, 30 * who.size());
  });
}

struct Crash : std::runtime_error {
  using std::runtime_error::runtime_error;
};

TEST(Trainer, GoesOnAfterACrashWithTheSameBits) {
  const TemporaryDirectory folders;
  for (const std::int64_t crash_at : {4, 6}) {
    for_all([&](const Who& who) {
      auto options = options_of(who);
      const Curve straight = by_trainer(who, options);
      options.checkpoint.folder = format_text("{}/{}-{}-{}", folders.path(), crash_at, who.size(), who.group ? 1 : 0);
      options.save_every = 2;
      options.on_step = [&](const TrainerState& state) {
        if (state.step == crash_at) throw Crash("on purpose");
      };
      EXPECT_THROW(by_trainer(who, options), Crash);
      options.on_step = nullptr;
      TrainerState end;
      const Curve rest = by_trainer(who, options, &end);
      EXPECT_EQ(end.step, 9);
      const std::vector<float> expected(straight.losses.end() - static_cast<std::ptrdiff_t>(rest.losses.size()),
                                        straight.losses.end());
      expect_same(rest, {expected, straight.bits});
      // From step 3, the end of an epoch, and from step 4, in the middle of one.
      EXPECT_EQ(rest.losses.size(), crash_at == 4 ? 6U : 5U);
      // Once more: it is at its end already.
      EXPECT_TRUE(by_trainer(who, options, &end).losses.empty());
      EXPECT_EQ(end.end, TrainerEnd::epochs);
    });
  }
}

TEST(Trainer, RandomNumbersGoOnAfterACrash) {
  // Dropout draws from the generator of the process; data without a cursor, of which the done batches are skipped.
  const std::vector<torch::data::Example<>> batches = {{numbers({3, 8}, 1), numbers({3, 4}, 2)},
                                                       {numbers({3, 8}, 3), numbers({3, 4}, 4)},
                                                       {numbers({2, 8}, 5), numbers({2, 4}, 6)}};
  const auto train = [&](const TrainerOptions& options, std::uint64_t seed) {
    torch::manual_seed(seed);
    Net net;
    testing_models::fill(*net, 1);
    torch::optim::Adam optimizer(net->parameters(), 0.01);
    Trainer trainer(net, optimizer, options);
    trainer.fit(batches, [&](auto& batch, Metrics& metrics) {
      metrics.add_sum("rows", static_cast<double>(batch.data.size(0)));
      return torch::mse_loss(net->forward(torch::dropout(batch.data, 0.5, true)), batch.target);
    });
    Curve curve;
    curve.end(net);
    EXPECT_EQ(trainer.state().train["rows"], 2) << "of the last step";
    return curve;
  };
  const TemporaryDirectory folder;
  TrainerOptions options{.epochs = 2, .log_every = 1, .progress = false};
  const Curve straight = train(options, 1);
  options.checkpoint.folder = folder.path();
  options.save_every = 1;
  options.on_step = [](const TrainerState& state) {
    if (state.step == 5) throw Crash("on purpose");
  };
  EXPECT_THROW(train(options, 1), Crash);
  options.on_step = nullptr;
  expect_same(train(options, 99), straight);
}

TEST(Trainer, AStopOfOneRankStopsAll) {
  // Ranks are processes: a signal is one process's.
  const auto result = run_ranks({.n = 2, .as = As::processes}, [](Rank& r) {
    const Who who{r.world};
    const Curve straight = by_trainer(who, options_of(who));
    auto options = options_of(who);
    options.graceful_stop = true;
    Job job(who);
    Trainer* running = nullptr;
    Curve curve;
    options.on_step = [&](const TrainerState& state) {
      curve.losses.push_back(state.loss.item<float>());
      if (who.rank() == 1 && state.step == 2) ::raise(SIGTERM);
      if (who.rank() == 0 && state.step == 5) running->stop();
    };
    Trainer trainer(job.net, job.optimizer, options);
    running = &trainer;
    for (const std::int64_t step : {2, 5}) {
      EXPECT_EQ(trainer.fit(sampled(*job.loader, job.sampler), job.loss()).end, TrainerEnd::stopped);
      EXPECT_EQ(trainer.state().step, step);
    }
    EXPECT_EQ(trainer.fit(sampled(*job.loader, job.sampler), job.loss()).end, TrainerEnd::epochs);
    curve.end(job.net);
    expect_same(curve, straight);
    r.report("steps", std::to_string(trainer.state().step));
  });
  if (result) {
    EXPECT_EQ(result.texts("steps"), (std::map<int, std::string>{{0, "9"}, {1, "9"}}));
  }
}

TEST(Trainer, EvaluatesEverySampleOnce) {
  for_all([](const Who& who) {
    Job job(who);
    Trainer trainer(job.net, job.optimizer, options_of(who));
    for (const std::int64_t count : {1, 2, 23}) {
      Points points(count);
      DistributedSampler sampler(
          static_cast<std::size_t>(count),
          {.num_replicas = who.size(), .rank = who.rank(), .shuffle = false, .mode = SamplerMode::evaluation});
      const auto loader = torch::data::make_data_loader(Points(count).map(torch::data::transforms::Stack<>()), sampler,
                                                        torch::data::DataLoaderOptions().batch_size(3));
      for (int again = 0; again < 2; ++again) {
        const auto row = trainer.evaluate(*loader, [&](auto& batch, Metrics& metrics) {
          EXPECT_FALSE(job.net->is_training());
          EXPECT_FALSE(torch::GradMode::is_enabled());
          metrics.add_sum("rows", static_cast<double>(batch.data.size(0)));
          return batch.data.sum(1).mean();
        });
        EXPECT_EQ(row.at("loss").count, static_cast<double>(count));
        EXPECT_EQ(row["rows"], static_cast<double>(count));
        EXPECT_EQ(row.begin()->name, "loss") << "comes first";
        EXPECT_NEAR(row["loss"], points.data.sum(1).mean().item<double>(), 1e-5);
        EXPECT_TRUE(job.net->is_training()) << "as before";
      }
    }
  });
}

TEST(Trainer, AllRanksStopEarlyAndKeepTheBest) {
  const TemporaryDirectory folders;
  for_all([&](const Who& who) {
    // What the epochs have reached: the second is the best.
    const std::vector<double> scores = {0.5, 0.9, 0.7, 0.9, 1.0, 1.0};
    auto options = options_of(who);
    options.epochs = 6;
    options.monitor = "score";
    options.mode = StopMode::max;
    options.patience = 2;
    options.checkpoint.folder = format_text("{}/{}-{}", folders.path(), who.size(), who.group ? 1 : 0);
    std::size_t epoch = 0;
    options.on_epoch = [&](const TrainerState& state) { epoch = state.epoch; };
    const std::vector<torch::data::Example<>> one = {{numbers({2, 8}), numbers({2, 4})}};
    for (const bool again : {false, true}) {
      Job job(who);
      Trainer trainer(job.net, job.optimizer, options);
      const auto& end = trainer.fit(sampled(*job.loader, job.sampler), one, [&](auto& batch, Metrics& metrics) {
        if (!job.net->is_training()) metrics.add("score", scores[std::min<std::size_t>(epoch, 5)]);
        return job.loss()(batch);
      });
      EXPECT_EQ(end.end, TrainerEnd::early);
      EXPECT_EQ(end.epoch, 4U);
      EXPECT_EQ(end.step, 12);
      EXPECT_EQ(epoch, 4U) << (again ? "nothing was trained" : "");
      EXPECT_EQ(end.evaluation.at("loss").count, 2.0 * who.size());
    }
    EXPECT_EQ(list_checkpoints(options.checkpoint.folder + "/best"), (std::vector<std::int64_t>{6}));
    EXPECT_EQ(list_checkpoints(options.checkpoint.folder), (std::vector<std::int64_t>{12, 9, 6}));
  });
}

/// What a GradScaler does, in few lines.
struct Scaler {
  torch::Tensor scale(const torch::Tensor& loss) const { return loss * factor; }
  void unscale_(torch::optim::Optimizer& optimizer) {
    for (const auto& group : optimizer.param_groups())
      for (const auto& parameter : group.params())
        if (parameter.grad().defined()) parameter.grad().div_(factor);
    unscaled = true;
  }
  void step(torch::optim::Optimizer& optimizer) {
    if (!unscaled) unscale_(optimizer);
    optimizer.step();
  }
  void update() {
    unscaled = false;
    ++updates;
  }
  std::string state_dict() const { return std::to_string(updates); }
  void load_state_dict(const std::string& text) { updates = std::stoi(text); }
  double factor = 1024;  // a power of two: nothing is rounded
  bool unscaled = false;
  int updates = 0;
};

TEST(Trainer, AScalerAndARegionOfAutocast) {
  for (const double norm : {0.0, kNorm}) {
    const Who who{nullptr};
    auto options = options_of(who);
    options.max_grad_norm = norm;
    const Curve plain = by_trainer(who, options);
    const TemporaryDirectory folder;
    options.checkpoint.folder = folder.path();
    int regions = 0, open = 0;
    options.autocast = [&]() -> std::shared_ptr<void> {
      ++regions, ++open;
      return std::shared_ptr<int>(&open, [](int* count) { --*count; });
    };
    for (const int updates : {9, 9}) {
      Job job(who);
      Scaler scaler;
      Trainer trainer(job.net, job.optimizer, options);
      trainer.use(scaler);
      trainer.fit(sampled(*job.loader, job.sampler), [&](auto& batch) {
        EXPECT_EQ(open, 1);
        return job.loss()(batch);
      });
      EXPECT_EQ(scaler.updates, updates) << "the second is loaded";
      Curve curve;
      curve.end(job.net);
      expect_same(curve, {{}, plain.bits});
    }
    EXPECT_EQ(regions, 15);
    EXPECT_EQ(open, 0);
  }
}

TEST(Trainer, WritesALogForPrograms) {
  const TemporaryDirectory folder;
  const Who who{nullptr};
  auto options = options_of(who);
  options.log_dir = folder.path() + "/log";
  options.log_every = 2;
  options.evaluate_every = 4;
  options.max_steps = 5;
  Job job(who);
  Trainer trainer(job.net, job.optimizer, options);
  const std::vector<torch::data::Example<>> one = {{numbers({2, 8}), numbers({2, 4})}};
  const auto& end = trainer.fit(sampled(*job.loader, job.sampler), one, [&](auto& batch, Metrics& metrics) {
    metrics.add("odd", std::nan(""));
    return job.loss()(batch);
  });
  EXPECT_EQ(end.end, TrainerEnd::steps);
  std::ifstream in(options.log_dir + "/log.jsonl");
  std::vector<std::string> kinds;
  for (std::string line; std::getline(in, line);) {
    const auto row = nlohmann::json::parse(line);
    kinds.push_back(format_text("{} {}", row["kind"].get<std::string>(), row["step"].get<int>()));
    EXPECT_TRUE(row["odd"].is_null());
    EXPECT_GT(row["loss"].get<double>(), 0);
    EXPECT_EQ(row.contains("grad_norm"), row["kind"] == "train");
    EXPECT_NEAR(row["lr"].get<double>(), rate_at(row["step"].get<int>() - 1, kRate), 1e-12);
  }
  EXPECT_EQ(kinds, (std::vector<std::string>{"train 2", "train 3", "train 4", "evaluation 4", "train 5"}));
  std::size_t curves = 0;
  for (const auto& name : names_in(options.log_dir)) curves += name.find("tfevents") != std::string::npos ? 1 : 0;
  EXPECT_EQ(curves, 1U);
}

TEST(Trainer, MistakesAreNamed) {
  const Who who{nullptr};
  Job job(who);
  const auto error_with = [&](const std::function<void(TrainerOptions&)>& change) {
    auto options = options_of(who);
    change(options);
    return error_of([&] {
      Trainer trainer(job.net, job.optimizer, options);
      trainer.fit(sampled(*job.loader, job.sampler), [&](auto& batch) { return batch.data; });
    });
  };
  const auto expect = [&](const std::string& text, const std::function<void(TrainerOptions&)>& change) {
    const std::string error = error_with(change);
    EXPECT_NE(error.find(text), std::string::npos) << error;
  };
  expect("0 batches make a step", [](auto& o) { o.accumulate = 0; });
  expect("a max_grad_norm of -1", [](auto& o) { o.max_grad_norm = -1; });
  expect("save_every -3", [](auto& o) { o.save_every = -3; });
  expect("every 0 steps", [](auto& o) { o.log_every = 0; });
  expect("patience 2 needs evaluations", [](auto& o) { o.patience = 2; });
  expect("a tensor of shape [2, 8]; expected a tensor of one element", [](auto&) {});
}

TEST(Trainer, OtherLoadersGoOnWhereTheFirstStopped) {
  const Who alone{nullptr};
  Job first(alone), second(alone);
  TrainerOptions options{.epochs = 1, .graceful_stop = false, .progress = false};
  Trainer* running = nullptr;
  options.on_step = [&](const TrainerState& state) {
    if (state.step == 2) running->stop();
  };
  Trainer trainer(first.net, first.optimizer, options);
  running = &trainer;
  EXPECT_EQ(trainer.fit(sampled(*first.loader, first.sampler), first.loss()).end, TrainerEnd::stopped);
  const TrainerState& end = trainer.fit(sampled(*second.loader, second.sampler), first.loss());
  EXPECT_EQ(end.end, TrainerEnd::epochs);
  EXPECT_EQ(end.step, 5) << "two before, three after";
}

}  // namespace
}  // namespace maniple::harness::trainer_test
