// Mixed precision: what autocast leaves behind, and GradScaler against its definition on 1, 2 and 3 ranks.
#include <cmath>
#include <limits>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/gradients.h"
#include "train/tensor/torch_compat.h"
#include <maniple/maniple.h>

namespace maniple::harness::amp_test {
namespace {

using torch::Tensor;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

torch::DeviceType device() { return training_device().type(); }
torch::ScalarType product_dtype() { return torch::mm(numbers({4, 4}), numbers({4, 4})).scalar_type(); }

TEST(Autocast, NestsAndRestores) {
  const auto before = autocast_dtype(device());
  EXPECT_EQ(product_dtype(), torch::kFloat32);
  {
    const Autocast outer(device(), {.dtype = torch::kBFloat16});
    EXPECT_EQ(product_dtype(), torch::kBFloat16);
    {
      const Autocast inner(device(), {.dtype = torch::kBFloat16, .enabled = false, .cache_enabled = false});
      EXPECT_EQ(product_dtype(), torch::kFloat32);
      EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
    }
    EXPECT_EQ(product_dtype(), torch::kBFloat16);
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  }
  EXPECT_EQ(product_dtype(), torch::kFloat32);
  EXPECT_EQ(autocast_dtype(device()), before);
  const auto enter = [](torch::DeviceType where, torch::ScalarType dtype) {
    const Autocast autocast(where, {.dtype = dtype});
  };
  EXPECT_THROW(enter(device(), torch::kFloat32), InvalidArgument);
  EXPECT_THROW(enter(torch::kXLA, torch::kBFloat16), InvalidArgument);
  EXPECT_FALSE(autocast_enabled(device()));
}

// The copies of weights are of one step: if they outlived the outermost region, the next step would use old weights.
TEST(Autocast, TheCacheEndsWithTheOutermostRegion) {
  const Tensor weight = numbers({4, 4}).set_requires_grad(true), x = numbers({4, 4}, 2);
  const auto product = [&] { return torch::mm(x, weight).detach().to(torch::kFloat32); };
  Tensor first, same, second;
  {
    const Autocast outer(device(), {.dtype = torch::kBFloat16});
    {
      const Autocast inner(device(), {.dtype = torch::kBFloat16});
      first = product();
    }
    weight.detach().mul_(2);
    same = product();
  }
  {
    const Autocast later(device(), {.dtype = torch::kBFloat16});
    second = product();
  }
  EXPECT_TRUE(torch::equal(same, first));
  EXPECT_TRUE(torch::equal(second, first * 2));
}

// ---- GradScaler -----------------------------------------------------------------------------------------------------

/// One parameter whose gradient is what a step says.
struct OneParameter {
  Tensor parameter = torch::zeros({3}, training_device()).set_requires_grad(true);
  torch::optim::SGD optimizer{{parameter}, 1.0};
  void backward(GradScaler& scaler, float gradient) {
    optimizer.zero_grad();
    scaler.scale((parameter * gradient).sum()).backward();
  }
};

TEST(GradScaler, FindsTheScale) {
  GradScaler scaler({.init_scale = 1024, .growth_interval = 3});
  OneParameter one;
  struct Step {
    float gradient;
    bool taken;
    double scale;
    int tracker;
  };
  double expected = 0;
  for (const Step& step : std::vector<Step>{{0.5, true, 1024, 1},
                                            {kInfinity, false, 512, 0},
                                            {kNan, false, 256, 0},
                                            {0.25, true, 256, 1},
                                            {0.25, true, 256, 2},
                                            {0.25, true, 512, 0},
                                            {-kInfinity, false, 256, 0}}) {
    one.backward(scaler, step.gradient);
    EXPECT_EQ(scaler.step(one.optimizer), step.taken);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), step.scale);
    EXPECT_EQ(scaler.get_growth_tracker(), step.tracker);
    if (step.taken) expected -= step.gradient;
    EXPECT_EQ(one.parameter[1].item<double>(), expected);
  }
  scaler.update(8.0);
  EXPECT_EQ(scaler.get_scale(), 8);
}

TEST(GradScaler, GrowsNoFurtherThanFloat32) {
  GradScaler scaler({.init_scale = 3e38, .growth_interval = 1});
  OneParameter one;
  one.backward(scaler, 1e-3F);
  EXPECT_TRUE(scaler.step(one.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), static_cast<double>(3e38F));
}

TEST(GradScaler, UnscalesEveryKindOfGradient) {
  GradScaler scaler({.init_scale = 8});
  const auto with_gradient = [](Tensor gradient) {
    Tensor parameter = torch::zeros_like(gradient).set_requires_grad(true);
    parameter.mutable_grad() = gradient;
    return parameter;
  };
  const Tensor base = numbers({6, 5, 4, 3});
  for (const float bad : {0.0F, kNan, kInfinity}) {
    for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16}) {
      for (int kind = 0; kind < 3; ++kind) {
        Tensor gradient = base.to(dtype).clone();
        if (bad != 0.0F) gradient.view(-1)[77] = bad;
        if (kind == 1) gradient = gradient.contiguous(torch::MemoryFormat::ChannelsLast);
        if (kind == 2) gradient = torch::cat({gradient, gradient}, 3).narrow(3, 0, 3);  // has gaps
        const Tensor expected = gradient / 8;
        std::vector<Tensor> parameters = {with_gradient(gradient), torch::zeros({2}, torch::requires_grad())};
        torch::optim::SGD optimizer(parameters, 0.0);
        scaler.unscale_(optimizer);
        EXPECT_TRUE(torch::equal(torch::nan_to_num(parameters[0].grad()), torch::nan_to_num(expected)));
        EXPECT_EQ(scaler.step(optimizer), bad == 0.0F) << kind << " " << c10::toString(dtype);
        scaler.update(8.0);
      }
    }
  }
}

TEST(GradScaler, SeveralOptimizersAndClipping) {
  GradScaler scaler({.init_scale = 64});
  OneParameter a, b;
  a.backward(scaler, 3);
  b.backward(scaler, kInfinity);
  scaler.unscale_(a.optimizer);
  EXPECT_NEAR(clip_grad_norm_(a.parameter, 1.0).item<double>(), 3 * std::sqrt(3.0), 1e-5);
  EXPECT_TRUE(scaler.step(a.optimizer));
  EXPECT_FALSE(scaler.step(b.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 32);  // once, although only one of two was not finite
  EXPECT_NEAR(a.parameter[0].item<double>(), -1 / std::sqrt(3.0), 1e-5);
  EXPECT_EQ(b.parameter[0].item<double>(), 0);
}

TEST(GradScaler, Errors) {
  EXPECT_THROW(GradScaler({.init_scale = 0}), InvalidArgument);
  EXPECT_THROW(GradScaler({.growth_factor = 1}), InvalidArgument);
  EXPECT_THROW(GradScaler({.backoff_factor = 1}), InvalidArgument);
  EXPECT_THROW(GradScaler({.growth_interval = 0}), InvalidArgument);
  GradScaler scaler;
  OneParameter one;
  EXPECT_THROW(scaler.update(), InvalidArgument);
  EXPECT_THROW(scaler.update(-1), InvalidArgument);
  one.backward(scaler, 1);
  scaler.unscale_(one.optimizer);
  EXPECT_THROW(scaler.unscale_(one.optimizer), InvalidArgument);
  EXPECT_TRUE(scaler.step(one.optimizer));
  EXPECT_THROW(scaler.step(one.optimizer), InvalidArgument);
  EXPECT_THROW(scaler.unscale_(one.optimizer), InvalidArgument);
  scaler.update();
  EXPECT_THROW(scaler.load_state_dict("1 2"), ProtocolError);
  EXPECT_THROW(scaler.load_state_dict("0x1p3 0x1p1 0x1p-1 5 7"), ProtocolError);

  Tensor half = torch::zeros({3}, torch::kFloat16).set_requires_grad(true);
  half.mutable_grad() = torch::ones({3}, torch::kFloat16);
  torch::optim::SGD optimizer({half}, 1.0);
  EXPECT_THROW(scaler.step(optimizer), InvalidArgument);
}

TEST(GradScaler, DisabledItStepsWithoutScaling) {
  GradScaler scaler({.enabled = false});
  OneParameter one;
  one.backward(scaler, 2);
  scaler.unscale_(one.optimizer);
  EXPECT_TRUE(scaler.step(one.optimizer));
  scaler.update();
  EXPECT_EQ(one.parameter[0].item<double>(), -2);
  EXPECT_EQ(scaler.get_scale(), 1);
}

TEST(GradScaler, GoesOnFromACheckpoint) {
  run_ranks({.n = 1}, [](Rank& r) {
    GradScaler saved({.init_scale = 128, .growth_interval = 3}), loaded;
    OneParameter one;
    for (const float gradient : {kInfinity, 1.0F, 1.0F}) {
      one.backward(saved, gradient);
      saved.step(one.optimizer);
      saved.update();
    }
    {
      Checkpoint checkpoint({.folder = r.dir() + "/scaler", .group = r.world});
      checkpoint.add("scaler", saved);
      checkpoint.save(1);
    }
    Checkpoint checkpoint({.folder = r.dir() + "/scaler", .group = r.world});
    checkpoint.add("scaler", loaded);
    EXPECT_EQ(checkpoint.load().value_or(0), 1);
    EXPECT_EQ(loaded.get_scale(), 64);
    EXPECT_EQ(loaded.get_growth_tracker(), 2);
    one.backward(loaded, 1);
    loaded.step(one.optimizer);
    loaded.update();
    EXPECT_EQ(loaded.get_scale(), 128);  // the third in a row
  });
}

// ---- Ranks ----------------------------------------------------------------------------------------------------------

// A scale is a power of two, so scaled and plain training are the same but for the steps that are left out.
TEST(GradScaler, DataParallelTrainingIsTheSameWithAndWithout) {
  for (const int n : {1, 2, 3}) {
    run_ranks({.n = n}, [](Rank& r) {
      auto plain = std::make_shared<NetImpl>(), net = std::make_shared<NetImpl>();
      fill(*plain, 3);
      fill(*net, 3);
      DistributedDataParallel<NetImpl> plain_ddp(plain, {.group = r.world});
      DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
      torch::optim::SGD plain_optimizer(plain->parameters(), 0.1), optimizer(net->parameters(), 0.1);
      GradScaler scaler({.init_scale = 256, .growth_interval = 2});
      for (int step = 0; step < 6; ++step) {
        const bool overflows = step == 3;
        Tensor loss, plain_loss;
        {
          const Autocast autocast(device(), {.dtype = torch::kBFloat16});
          const Tensor batch = shard(numbers({12, 8}, step), r.rank, r.size);
          loss = loss_of(ddp(batch).to(torch::kFloat32));
          plain_loss = loss_of(plain_ddp(batch).to(torch::kFloat32));
        }
        // Of one rank alone; in the average of all.
        if (overflows && r.rank == r.size - 1) loss = loss * kInfinity;
        optimizer.zero_grad();
        plain_optimizer.zero_grad();
        scaler.scale(loss).backward();
        plain_loss.backward();
        EXPECT_EQ(scaler.step(optimizer), !overflows);
        scaler.update();
        if (!overflows) plain_optimizer.step();
        EXPECT_EQ(scaler.get_scale(), step < 1 ? 256 : step < 3 ? 512 : step < 5 ? 256 : 512) << step;
        expect_same_everywhere(r, *net, false);
      }
      const auto trained = net->parameters(), expected = plain->parameters();
      for (std::size_t i = 0; i < trained.size(); ++i) EXPECT_TRUE(torch::equal(trained[i], expected[i])) << i;
    });
  }
}

TEST(GradScaler, RanksWithOtherParametersDecideTogether) {
  run_ranks({.n = 3}, [](Rank& r) {
    GradScaler scaler({.init_scale = 16, .group = r.world});
    OneParameter one;
    for (int step = 0; step < 4; ++step) {
      one.backward(scaler, step == r.rank ? kInfinity : 1);
      EXPECT_EQ(scaler.step(one.optimizer), step == 3);  // in each of the others one rank's gradient is not finite
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), step == 0 ? 8 : step == 1 ? 4 : 2);
    }
  });
}

// Parameters in bfloat16, communicated in bfloat16: the one mechanism for that is a hook.
TEST(MixedPrecision, ParametersAndCommunicationInBFloat16) {
  for (const bool hook : {false, true}) {
    run_ranks({.n = 2}, [hook](Rank& r) {
      auto whole = std::make_shared<NetImpl>(), net = std::make_shared<NetImpl>();
      fill(*whole, 3);
      fill(*net, 3);
      const auto dtype = hook ? torch::kFloat32 : torch::kBFloat16;
      net->to(dtype);
      DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
      if (hook) ddp.register_comm_hook(comm_hook_named("bf16"));
      const Tensor batch = numbers({12, 8});
      for (int step = 0; step < 2; ++step) {
        whole->zero_grad();
        net->zero_grad();
        loss_of(whole->forward(batch)).backward();
        loss_of(ddp(shard(batch, r.rank, r.size).to(dtype))).backward();
        expect_close(gradients_of(*net), gradients_of(*whole), 4e-2);
        expect_same_everywhere(r, *net);
      }
    });
  }
}

TEST(GradScaler, ShortLossesAreScaledInFloat32) {
  GradScaler scaler;
  const Tensor scaled = scaler.scale(torch::full({1}, 2.0, torch::kFloat16));
  EXPECT_EQ(scaled.scalar_type(), torch::kFloat32);
  EXPECT_EQ(scaled.item<double>(), 131072);
}

}  // namespace
}  // namespace maniple::harness::amp_test
