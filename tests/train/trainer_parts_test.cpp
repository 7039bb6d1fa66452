// A Trainer of a part of a model: an optimizer that has not all parameters, and layers in evaluation mode.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

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
  // Those of the others are of the last step: the same as of one more by hand, but for the head, which has changed little since.
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

}  // namespace
}  // namespace maniple::harness::trainer_parts_test
