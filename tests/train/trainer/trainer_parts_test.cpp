// A Trainer of a part of a model: an optimizer that has not all parameters, and layers in evaluation mode. And what it
// does with gradients that are not finite.
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "harness/run_ranks.h"
#include "train/models.h"
#include <maniple/train/clip_grad.h>
#include <maniple/train/trainer.h>

namespace maniple::harness::trainer_parts_test {
namespace {

using testing_models::Net;
using testing_models::numbers;

std::vector<torch::data::Example<>> some_batches(int count) {
  std::vector<torch::data::Example<>> batches;
  for (int i = 0; i < count; ++i) batches.emplace_back(numbers({4, 8}, i), numbers({4, 4}, i + 100));
  return batches;
}

TEST(TrainerParts, AnOptimizerOfAPartOfTheModel) {
  Net net(16, true);
  testing_models::fill(*net, 1);
  torch::optim::SGD head(net->fc2->parameters(), 0.1);
  TrainerOptions options{.max_grad_norm = 1e9, .graceful_stop = false, .log_every = 1, .progress = false};
  int steps = 0;
  options.on_step = [&](const TrainerState& state) {
    const auto norm = clip_grad_norm_(net->fc2->parameters(), std::numeric_limits<double>::infinity());
    EXPECT_EQ(state.train["grad_norm"], norm.item<double>()) << "of the optimizer's parameters alone";
    ++steps;
  };
  const auto loss = [&](auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); };
  Trainer(net, head, options).fit(some_batches(3), loss);
  EXPECT_EQ(steps, 3);
  // Those of the others are of the last step: the same as of one more by hand, but for the head, which has changed
  // little since.
  const torch::Tensor last = net->fc1->weight.grad().clone();
  net->fc1->weight.mutable_grad() = torch::Tensor();
  auto batch = some_batches(3).back();
  loss(batch).backward();
  EXPECT_LT((last - net->fc1->weight.grad()).norm().item<double>(), 0.5 * last.norm().item<double>());
}

TEST(TrainerParts, PartsInEvaluationModeStaySo) {
  Net net(16, true);
  net->norm->eval();
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  TrainerOptions options{.epochs = 2, .graceful_stop = false, .progress = false};
  options.on_step = [&](const TrainerState&) {
    EXPECT_TRUE(net->is_training());
    EXPECT_FALSE(net->norm->is_training());
  };
  const auto loss = [&](auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); };
  Trainer trainer(net, optimizer, options);
  trainer.fit(some_batches(2), some_batches(1), loss);
  EXPECT_EQ(net->norm->num_batches_tracked.item<std::int64_t>(), 0);
  net->eval();
  trainer.evaluate(some_batches(1), loss);
  EXPECT_FALSE(net->is_training());
}

/// Trains 3 steps on 2 ranks; rank 1's second batch has a NaN in it.
struct BadBatch {
  BadBatch(const Rank& r, NonfiniteGradients choice, double max_grad_norm) : batches(some_batches(3)) {
    testing_models::fill(*net, 1);
    if (r.rank == 1) batches[1].data[0][0] = std::numeric_limits<double>::quiet_NaN();
    TrainerOptions options{.max_grad_norm = max_grad_norm,
                           .nonfinite_gradients = choice,
                           .graceful_stop = false,
                           .progress = false,
                           .strategy = strategy::DataParallel{.ddp = {.group = r.world}}};
    options.on_step = [this](const TrainerState&) {
      if (net->fc1->weight.isfinite().all().item<bool>()) finite_steps++;
    };
    trainer.emplace(net, optimizer, options);
  }
  const TrainerState& fit() {
    return trainer->fit(batches,
                        [this](auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); });
  }
  std::vector<torch::data::Example<>> batches;
  Net net;
  torch::optim::SGD optimizer{net->parameters(), 0.1};
  std::optional<Trainer> trainer;
  int finite_steps = 0;
};

TEST(TrainerParts, ANaNOfOneRankIsNamedOnAllAndLeavesTheWeightsAlone) {
  for (const double max_grad_norm : {0.0, 1.0}) {
    run_ranks({.n = 2}, [&](Rank& r) {
      BadBatch training(r, NonfiniteGradients::automatic, max_grad_norm);
      try {
        training.fit();
        ADD_FAILURE() << "a NaN went unnoticed";
      } catch (const InvalidArgument& error) {
        const std::string text = error.what();
        EXPECT_NE(
            text.find("step 1 are not finite: on rank 1 the loss is nan and the gradient of parameter fc1.weight"),
            std::string::npos)
            << text;
        EXPECT_EQ(error.info().origin, 1);
      }
      EXPECT_EQ(training.trainer->state().step, 1);
      EXPECT_TRUE(training.net->fc1->weight.isfinite().all().item<bool>());
    });
  }
}

TEST(TrainerParts, AStepWithANaNCanBeSkipped) {
  run_ranks({.n = 2}, [](Rank& r) {
    BadBatch training(r, NonfiniteGradients::skip, 0);
    EXPECT_EQ(training.fit().step, 3);
    EXPECT_EQ(training.finite_steps, 3);
    const auto& weight = training.net->fc1->weight;
    const torch::Tensor mine = weight.detach().clone();
    r.world->all_reduce(Buffer{mine.data_ptr(), static_cast<std::size_t>(mine.numel()), DType::float32}, ReduceOp::max);
    EXPECT_TRUE(mine.equal(weight.detach()));

    BadBatch ignoring(r, NonfiniteGradients::ignore, 0);
    EXPECT_EQ(ignoring.fit().step, 3);
    EXPECT_EQ(ignoring.finite_steps, 1);
  });
}

TEST(TrainerParts, StoppedBeforeTheFirstEvaluationTheRowIsEmpty) {
  Net net;
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  Trainer* running = nullptr;
  Trainer trainer(net, optimizer, {.progress = false, .on_step = [&](const TrainerState&) { running->stop(); }});
  running = &trainer;
  const auto& end = trainer.fit(some_batches(2), some_batches(1),
                                [&](auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); });
  EXPECT_EQ(end.end, TrainerEnd::stopped);
  EXPECT_EQ(end.evaluation.value_or("loss", 7), 7);
  EXPECT_FALSE(end.evaluation.contains("loss"));
  try {
    end.evaluation.at("loss");
    ADD_FAILURE() << "there is no evaluation";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("ended before its first evaluation"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace maniple::harness::trainer_parts_test
