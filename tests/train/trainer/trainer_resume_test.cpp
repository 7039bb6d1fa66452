// A Trainer with all that has a state of its own: loader, schedule, scaler, optimizer, random numbers. Killed in the
// middle of an epoch, it goes on in other processes with the same bits. And what it does with ranges of batches that
// are not containers.
#include <gtest/gtest.h>

#include <csignal>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "comm/base/format.h"
#include "harness/run_ranks.h"
#include "harness/shared_folder.h"
#include "train/models.h"
#include <maniple/train/amp.h>
#include <maniple/train/data_loader.h>
#include <maniple/train/lr_scheduler.h>
#include <maniple/train/optim.h>
#include <maniple/train/trainer.h>
#include <maniple/train/weights.h>

namespace maniple::harness::trainer_resume_test {
namespace {

using testing_models::Net;
using testing_models::numbers;
using Example = torch::data::Example<>;

/// Samples with noise of their own in every epoch, as augmentations are.
struct Noisy {
  Example get(std::size_t index, SampleRandom& random) const {
    const auto noise = static_cast<float>(random.unit());
    return {numbers({8}, static_cast<int>(index)) + noise, numbers({4}, static_cast<int>(index) + 50)};
  }
  std::size_t size() const { return count; }
  std::size_t count = 0;
};

constexpr std::size_t kBatch = 2, kEpochs = 2;
constexpr std::int64_t kSteps = 10;    // five in an epoch
constexpr std::int64_t kOverflow = 2;  // the step whose gradients are infinite, on one rank
constexpr std::int64_t kKilledAfter = 4;

/// What each step shows of every state: loss, rate, scale, and good steps in a row.
struct Trained {
  std::vector<std::vector<double>> steps;
  std::vector<std::pair<std::string, torch::Tensor>> tensors;
};

Trained train(Rank& r, const std::string& folder, bool dies, std::uint64_t seed) {
  torch::manual_seed(seed + static_cast<std::uint64_t>(r.rank));  // of dropout: the checkpoint's generators replace it
  Net net(16);
  testing_models::fill(*net, static_cast<int>(seed));
  optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  LrScheduler scheduler(optimizer, lr::one_cycle({.max_lr = 0.05, .steps = kSteps}));
  GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
  const auto size = 5 * kBatch * static_cast<std::size_t>(r.size);
  DataLoader loader(Noisy{size}, DistributedSampler(size, {.num_replicas = r.size, .rank = r.rank, .seed = 5}),
                    {.batch_size = kBatch, .workers = 2, .seed = 5});

  Trained result;
  TrainerOptions options{.epochs = kEpochs, .max_grad_norm = 1, .save_every = 2, .progress = false};
  options.checkpoint.folder = folder;
  options.checkpoint.background = false;
  options.strategy = strategy::DataParallel{.ddp = {.group = r.world}};
  options.schedule = [&] { scheduler.step(); };
  options.autocast = [] { return std::make_shared<Autocast>(torch::kCPU); };
  options.on_step = [&](const TrainerState& state) {
    result.steps.push_back({state.loss.item<double>(), scheduler.lrs()[0], scaler.get_scale(),
                            static_cast<double>(scaler.get_growth_tracker())});
    if (dies && state.step == kKilledAfter + 1) ::raise(SIGKILL);
  };
  Trainer trainer(net, optimizer, options);
  trainer.add("scheduler", scheduler).use(scaler);
  const auto& end = trainer.fit(loader, [&](auto& batch) {
    const torch::Tensor output = net->forward(torch::dropout(batch.data, 0.3, true));
    const auto loss = torch::mse_loss(output.to(torch::kFloat32), batch.target);
    const bool overflows = trainer.state().step == kOverflow && r.rank == r.size - 1;
    return overflows ? loss * std::numeric_limits<float>::infinity() : loss;
  });
  EXPECT_EQ(end.step, kSteps);
  for (const auto& item : net->named_parameters()) result.tensors.emplace_back(item.key(), item.value().detach());
  return result;
}

TEST(TrainerResume, KilledInTheMiddleOfAnEpochItEndsWithTheSameBits) {
  const SharedFolder shared;
  for (const int n : {1, 2, 3}) {
    const std::string mine = format_text("{}/{}", SharedFolder::here(), n);
    RunOptions run{.n = n, .as = As::processes, .env = shared.env()};
    for (int rank = 0; rank < n; ++rank) run.expect_dead.push_back(rank);
    const auto killed = run_ranks(run, [&](Rank& r) { train(r, mine, true, 1); });
    if (killed) {
      for (const auto& ended : killed.ended) EXPECT_FALSE(ended.finished) << n << " ranks";
    }
    run.expect_dead.clear();
    run_ranks(run, [&](Rank& r) {
      const Trained straight = train(r, "", false, 1), rest = train(r, mine, false, 99);
      ASSERT_EQ(straight.steps.size(), static_cast<std::size_t>(kSteps));
      ASSERT_EQ(rest.steps.size(), static_cast<std::size_t>(kSteps - kKilledAfter)) << "it goes on after step 4 of 5";
      for (std::size_t i = 0; i < rest.steps.size(); ++i)
        EXPECT_EQ(rest.steps[i], straight.steps[i + kKilledAfter]) << "step " << i + kKilledAfter;
      for (std::size_t i = 0; i < rest.tensors.size(); ++i)
        EXPECT_TRUE(rest.tensors[i].second.equal(straight.tensors[i].second)) << rest.tensors[i].first;
      // The states are of some use: the overflow has halved the scale (doubled before), good steps double it again.
      EXPECT_EQ(straight.steps[1][2], 2048);
      EXPECT_EQ(straight.steps[kOverflow][2], 1024);
      EXPECT_EQ(straight.steps[kKilledAfter][2], 2048);
      EXPECT_NE(straight.steps[kKilledAfter][1], straight.steps[0][1]);
    });
  }
}

/// A range that goes once and fills the same tensors again and again, as readers of devices do.
class Refilled {
 public:
  explicit Refilled(int count) : count_(count), batch_(torch::zeros({2, 8}), torch::zeros({2, 4})) {}
  class Iterator {
   public:
    explicit Iterator(Refilled* of) : of_(of) {}
    Example& operator*() const { return of_->batch_; }
    Iterator& operator++() {
      of_->fill(++of_->at_);
      return *this;
    }
    bool operator!=(const Iterator&) const { return of_->at_ < of_->count_; }

   private:
    Refilled* of_;
  };
  Iterator begin() {
    fill(at_ = 0);
    return Iterator(this);
  }
  Iterator end() { return Iterator(this); }
  static Example expected(int i) { return {numbers({2, 8}, i), numbers({2, 4}, i + 100)}; }

 private:
  void fill(int i) {
    batch_.data.copy_(expected(i).data);  // after the last batch, too: the old data is gone
    batch_.target.copy_(expected(i).target);
  }
  int count_, at_ = 0;
  Example batch_;
};

TEST(TrainerRanges, ABatchIsUsedBeforeItsTensorsAreFilledAgain) {
  for (const int accumulate : {1, 2, 3}) {
    for (const int count : {1, 4, 5}) {
      const auto trained = [&](auto&& batches, std::vector<torch::Tensor>* seen) {
        Net net(16);
        testing_models::fill(*net, 1);
        torch::optim::SGD optimizer(net->parameters(), 0.1);
        TrainerOptions options{.epochs = 2, .accumulate = accumulate, .graceful_stop = false, .progress = false};
        Trainer trainer(net, optimizer, options);
        const auto loss = [&](auto& batch) {
          seen->push_back(batch.data.clone());
          return torch::mse_loss(net->forward(batch.data), batch.target);
        };
        EXPECT_EQ(trainer.fit(batches, loss).step, 2 * ((count + accumulate - 1) / accumulate)) << accumulate;
        seen->push_back(torch::full({}, trainer.evaluate(batches, loss)["loss"]));
        return net;
      };
      std::vector<Example> held;
      for (int i = 0; i < count; ++i) held.push_back(Refilled::expected(i));
      std::vector<torch::Tensor> seen, expected;
      const Net a = trained(Refilled(count), &seen), b = trained(held, &expected);
      ASSERT_EQ(seen.size(), expected.size());
      for (std::size_t i = 0; i < seen.size(); ++i) EXPECT_TRUE(seen[i].equal(expected[i])) << i;
      EXPECT_TRUE(a->fc1->weight.equal(b->fc1->weight)) << accumulate << ", " << count;
    }
  }
}

}  // namespace
}  // namespace maniple::harness::trainer_resume_test
