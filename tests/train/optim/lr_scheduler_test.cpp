// Learning-rate schedules: the numbers of PyTorch's documentation, its recursive formulas, and states in checkpoints.
#include <maniple/train/lr_scheduler.h>

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "harness/error_of.h"
#include "harness/temporary_directory.h"
#include <maniple/train/checkpoint.h>
#include <maniple/train/optim.h>

namespace maniple::harness::lr_scheduler_test {
namespace {

constexpr double kPi = std::numbers::pi;

torch::Tensor weight() { return torch::zeros({2}).requires_grad_(); }

/// The rates of steps 0, 1, ..., by a scheduler.
std::vector<double> rates(const LrSchedule& schedule, double base, int count) {
  torch::optim::SGD optimizer({weight()}, torch::optim::SGDOptions(base));
  LrScheduler scheduler(optimizer, schedule);
  std::vector<double> result = scheduler.lrs();
  while (static_cast<int>(result.size()) < count) {
    scheduler.step();
    result.push_back(scheduler.lrs()[0]);
  }
  return result;
}

void expect_rates(const std::vector<double>& actual, const std::vector<double>& expected, const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i)
    EXPECT_NEAR(actual[i], expected[i], 1e-13 + 1e-12 * std::abs(expected[i])) << what << ", step " << i;
}

// The examples of PyTorch's reference.
TEST(LrSchedule, ExamplesOfPyTorch) {
  expect_rates(rates(lr::linear({.start_factor = 0.5, .steps = 4}), 0.05, 6),
               {0.025, 0.03125, 0.0375, 0.04375, 0.05, 0.05}, "LinearLR");
  expect_rates(rates(lr::constant(0.5, 4), 0.05, 6), {0.025, 0.025, 0.025, 0.025, 0.05, 0.05}, "ConstantLR");
  expect_rates(rates(lr::polynomial(4), 0.001, 6), {0.001, 0.00075, 0.0005, 0.00025, 0, 0}, "PolynomialLR");
  expect_rates(rates(lr::step(2, 0.1), 0.05, 5), {0.05, 0.05, 0.005, 0.005, 0.0005}, "StepLR");
  expect_rates(rates(lr::multi_step({2, 3}, 0.1), 0.05, 5), {0.05, 0.05, 0.005, 0.0005, 0.0005}, "MultiStepLR");
  expect_rates(rates(lr::sequential({lr::constant(0.1, 2), lr::exponential(0.9)}, {2}), 0.05, 5),
               {0.005, 0.005, 0.05, 0.045, 0.0405}, "SequentialLR");
  expect_rates(rates(lr::chained({lr::constant(0.1, 2), lr::exponential(0.9)}), 0.05, 4),
               {0.005, 0.0045, 0.0405, 0.03645}, "ChainedScheduler");
}

// PyTorch computes each rate from the one before; ours depends on the number of steps alone.
TEST(LrSchedule, EqualsTheRecursions) {
  const double base = 0.3, low = 0.01, gamma = 0.97;
  const int steps = 20, count = 50;
  std::vector<double> cosine = {base}, exponential = {base}, polynomial = {base};
  for (int t = 1; t < count; ++t) {
    // CosineAnnealingLR's get_lr, with its case for the turning point.
    if ((t - 1 - steps) % (2 * steps) == 0) {
      cosine.push_back(cosine.back() + (base - low) * (1 - std::cos(kPi / steps)) / 2);
    } else {
      cosine.push_back((1 + std::cos(kPi * t / steps)) / (1 + std::cos(kPi * (t - 1) / steps)) * (cosine.back() - low) +
                       low);
    }
    exponential.push_back(exponential.back() * gamma);
    polynomial.push_back(
        t > steps ? 0 : polynomial.back() * std::pow((1 - double(t) / steps) / (1 - double(t - 1) / steps), 2.5));
  }
  const auto near = [](const std::vector<double>& a, const std::vector<double>& b, const char* what) {
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-9) << what << i;
  };
  near(rates(lr::cosine({.steps = steps, .minimum = low}), base, count), cosine, "cosine ");
  near(rates(lr::exponential(gamma), base, count), exponential, "exponential ");
  near(rates(lr::polynomial(steps, 2.5), base, count), polynomial, "polynomial ");
}

TEST(LrSchedule, CosineWithRestarts) {
  const auto wave = [](double part) { return 0.1 + 0.9 * (1 + std::cos(kPi * part)) / 2; };
  std::vector<double> expected;
  for (const int period : {3, 6, 12}) {
    for (int t = 0; t < period; ++t) expected.push_back(wave(double(t) / period));
  }
  expect_rates(rates(lr::cosine_restarts({.steps = 3, .growth = 2, .minimum = 0.1}), 1, 21), expected, "growing");
  expected.clear();
  for (int t = 0; t < 9; ++t) expected.push_back(wave(t % 3 / 3.0));
  expect_rates(rates(lr::cosine_restarts({.steps = 3, .minimum = 0.1}), 1, 9), expected, "equal");
}

TEST(LrSchedule, OneCycle) {
  const auto momentum_of = [](torch::optim::Optimizer& optimizer) {
    auto& options = optimizer.param_groups()[0].options();
    if (const auto* sgd = dynamic_cast<torch::optim::SGDOptions*>(&options)) return sgd->momentum();
    return std::get<0>(dynamic_cast<torch::optim::AdamWOptions&>(options).betas());
  };
  const auto check = [&](torch::optim::Optimizer& optimizer) {
    LrScheduler scheduler(optimizer, lr::one_cycle({.max_lr = 1, .steps = 20}));
    const double first = 1.0 / 25, last = first / 1e4;
    const auto cosine = [](double from, double to, double part) {
      return to + (from - to) / 2 * (std::cos(kPi * part) + 1);
    };
    for (int t = 0; t < 20; ++t) {  // up until step 0.3 * 20 - 1, down until step 19
      const bool up = t <= 5;
      const double part = up ? t / 5.0 : (t - 5) / 14.0;
      EXPECT_NEAR(scheduler.lrs()[0], up ? cosine(first, 1, part) : cosine(1, last, part), 1e-12) << t;
      EXPECT_NEAR(momentum_of(optimizer), up ? cosine(0.95, 0.85, part) : cosine(0.85, 0.95, part), 1e-12) << t;
      scheduler.step();
    }
    EXPECT_NEAR(scheduler.lrs()[0], last, 1e-15) << "stays";
  };
  torch::optim::SGD sgd({weight()}, torch::optim::SGDOptions(0.3).momentum(0.5));
  optim::AdamW adamw(std::vector{weight()});
  check(sgd);
  check(adamw);

  const auto three = rates(lr::one_cycle({.max_lr = 2,
                                          .steps = 10,
                                          .rise = 0.4,
                                          .anneal = lr::Anneal::linear,
                                          .cycle_momentum = false,
                                          .divide_start = 4,
                                          .divide_end = 10,
                                          .three_phases = true}),
                           0.1, 10);
  expect_rates(three, {0.5, 1, 1.5, 2, 1.5, 1, 0.5, 0.35, 0.2, 0.05}, "three phases");  // ends at 3, 6, 9
  torch::optim::Adagrad adagrad({weight()}, torch::optim::AdagradOptions(0.1));
  EXPECT_NE(error_of([&] { LrScheduler(adagrad, lr::one_cycle({.max_lr = 1, .steps = 9})); }).find("has none"),
            std::string::npos);
}

TEST(LrScheduler, GroupsHaveRatesOfTheirOwn) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{weight()});
  groups.emplace_back(std::vector{weight()}, std::make_unique<torch::optim::SGDOptions>(1.0));
  torch::optim::SGD optimizer(groups, torch::optim::SGDOptions(0.1));
  LrScheduler scheduler(optimizer, lr::step(1, 0.5));
  scheduler.step();
  expect_rates(scheduler.lrs(), {0.05, 0.5}, "one schedule");
  scheduler.set_steps(0);
  LrScheduler each(optimizer, std::vector{lr::step(1, 0.5), lr::exponential(0.9)});
  each.step();
  expect_rates(each.lrs(), {0.05, 0.9}, "one for each");
  EXPECT_NE(error_of([&] { LrScheduler(optimizer, std::vector{lr::exponential(0.9)}); }).find("1 schedules for 2"),
            std::string::npos);

  const auto own = std::make_shared<optim::Lion>(std::vector{weight()}, optim::LionOptions(0.2));
  LrScheduler several({own, std::make_shared<torch::optim::Adam>(std::vector{weight()}, 0.4)}, lr::exponential(0.5));
  several.step();
  expect_rates(several.lrs(), {0.1, 0.2}, "several optimizers");
}

TEST(LrScheduler, GoesOnFromACheckpoint) {
  const TemporaryDirectory folder;
  const auto schedule = lr::sequential({lr::linear({.start_factor = 0.1, .steps = 3}), lr::cosine({.steps = 7})}, {3});
  const std::vector<double> straight = rates(schedule, 0.7, 10);
  const auto run = [&](double base, bool resumes) {
    torch::optim::SGD optimizer({weight()}, torch::optim::SGDOptions(base));
    LrScheduler scheduler(optimizer, schedule);
    PlateauScheduler plateau(optimizer);
    Checkpoint checkpoint({.folder = folder.path()});
    checkpoint.add("optimizer", optimizer).add("scheduler", scheduler).add("plateau", plateau);
    if (resumes) {
      EXPECT_EQ(checkpoint.load(), std::optional<std::int64_t>(4));
      EXPECT_EQ(plateau.best(), 3.5);
      EXPECT_EQ(plateau.bad_steps(), 1);
    }
    for (std::int64_t t = scheduler.steps(); t < (resumes ? 9 : 4); ++t) {
      EXPECT_EQ(scheduler.lrs()[0], straight[static_cast<std::size_t>(t)]) << t;
      scheduler.step();
    }
    if (resumes) return;
    plateau.step(3.5);
    plateau.step(4);
    checkpoint.save(4);
  };
  run(0.7, false);
  run(0.1, true);  // the base rate is the saved one

  torch::optim::SGD optimizer({weight()}, torch::optim::SGDOptions(1));
  LrScheduler scheduler(optimizer, schedule);
  EXPECT_THROW(scheduler.load_state_dict("PlateauScheduler 1 2 3"), ProtocolError);
  EXPECT_THROW(scheduler.load_state_dict("LrScheduler x"), Error);
  EXPECT_NE(error_of([&] { scheduler.load_state_dict("LrScheduler 1 0x1p0 0x1p0"); }).find("saved for 2"),
            std::string::npos);
}

TEST(PlateauScheduler, LowersTheRateWhenNothingGetsBetter) {
  torch::optim::SGD optimizer({weight()}, torch::optim::SGDOptions(1));
  const auto rate = [&] { return optimizer.param_groups()[0].options().get_lr(); };
  PlateauScheduler plateau(optimizer, {.factor = 0.5, .patience = 2, .cooldown = 1, .min_lr = 0.3});
  for (const double loss : {1.0, 0.5, 0.5, 0.49999, std::nan("")}) plateau.step(loss);
  EXPECT_EQ(rate(), 0.5) << "three in a row did not improve, or not by enough";
  for (const double loss : {0.6, 0.6, 0.6}) EXPECT_FALSE(plateau.step(loss)) << "the first is in the cooldown";
  EXPECT_TRUE(plateau.step(0.6));
  EXPECT_EQ(rate(), 0.3) << "not below min_lr";
  for (int i = 0; i < 9; ++i) EXPECT_FALSE(plateau.step(0.6));

  PlateauScheduler grows(optimizer, {.mode = StopMode::max, .patience = 0, .threshold = 0.1, .relative = false});
  EXPECT_FALSE(grows.step(0.5));
  EXPECT_FALSE(grows.step(0.7));
  EXPECT_TRUE(grows.step(0.75));
  EXPECT_NEAR(rate(), 0.03, 1e-12);
}

TEST(LrSchedule, MistakesAreNamed) {
  const auto expect = [](const auto& call, const char* text) {
    EXPECT_NE(error_of(call).find(text), std::string::npos) << error_of(call);
  };
  expect([] { lr::cosine({}); }, "lr::cosine: in 0 steps");
  expect([] { lr::linear({.start_factor = 0}); }, "from a factor of 0");
  expect([] { lr::one_cycle({.max_lr = 1}); }, "lr::one_cycle: in 0 steps");
  expect([] { lr::multi_step({3, 2}); }, "[3, 2]");
  expect([] { lr::sequential({lr::exponential(1)}, {3}); }, "1 schedules and 1 milestones");
  expect([] { lr::sequential({lr::exponential(1), lr::one_cycle({.max_lr = 1, .steps = 5})}, {3}); }, "all or none");
  expect([] { lr::step(0); }, "a size of 0");
}

}  // namespace
}  // namespace maniple::harness::lr_scheduler_test
