// int8 gradients within their bound, post-local SGD, averaging of models.
#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/ddp/hooks/hook_parts.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::ddp_hooks_test {
namespace {

constexpr std::int64_t kBlock = 16;
const PrescribedGradients::Shapes kShapes = {{"a", {10, 30}}, {"b", {7}}, {"c", {2}}, {"d", {129}}};

/// The largest magnitude of each block, spread over its numbers.
torch::Tensor largest_in_block(const torch::Tensor& values) {
  torch::Tensor result = values.flatten().abs().clone();
  for (std::int64_t from = 0; from < result.numel(); from += kBlock) {
    torch::Tensor block = result.narrow(0, from, std::min(kBlock, result.numel() - from));
    block.fill_(block.max().item<double>());
  }
  return result.view(values.sizes());
}

/// What the header promises.
torch::Tensor bound_of(const std::vector<Gradients>& all, const std::string& name) {
  torch::Tensor sum = torch::zeros_like(all[0].at(name));
  for (const Gradients& one : all) sum += largest_in_block(one.at(name)) / static_cast<double>(all.size());
  return (sum + largest_in_block(mean_of(all).at(name)) * (1 + 1 / 254.0)) / 254.0 * (1 + 1e-5) + 1e-6 * sum;
}

std::vector<Gradients> of_all(int n, int step) {
  std::vector<Gradients> all;
  for (int r = 0; r < n; ++r) all.push_back(gradients_in(kShapes, r, step));
  return all;
}

/// Every parameter is a bucket, so that blocks begin where it begins.
DdpOptions each_alone(Rank& r, Overlap overlap = Overlap::none) {
  return {.bucket_cap_mb = kTiny, .first_bucket_mb = kTiny, .group = r.world, .overlap = overlap};
}

TEST(DdpInt8, ErrorsStayWithinTheBound) {
  for (const int n : {1, 2, 3, 4}) {
    for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
      run_ranks({.n = n}, [&](Rank& r) {
        auto net = std::make_shared<PrescribedGradients>(kShapes, dtype);
        DistributedDataParallel<PrescribedGradients> ddp(
            net, each_alone(r, n % 2 == 0 ? Overlap::thread : Overlap::inline_));
        auto state = std::make_shared<Int8State>(Int8Options{.block_size = kBlock});
        ddp.register_comm_hook(int8_quantize_hook(state));
        for (int step = 0; step < 3; ++step) {
          net->zero_grad();
          net->loss(gradients_in(kShapes, r.rank, step)).backward();
          const auto all = of_all(r.size, step);
          const Gradients own = gradients_of(*net), exact = mean_of(all);
          for (const auto& [name, expected] : exact) {
            const torch::Tensor error = (own.at(name).cpu().to(torch::kFloat64) - expected).abs();
            EXPECT_TRUE((error <= bound_of(all, name)).all().item<bool>())
                << name << ": " << (error / bound_of(all, name)).max().item<double>() << " of the bound";
            if (name == "a") {
              EXPECT_GT(error.max().item<double>(), 1e-6) << "nothing was quantized";
            }
          }
          expect_same_everywhere(r, *net);
        }
        EXPECT_TRUE(state->state_dict().empty());
      });
    }
  }
}

TEST(DdpInt8, BytesAreAQuarter) {
  for (const int n : {2, 3, 4}) {
    run_ranks({.n = n}, [](Rank& r) {
      const PrescribedGradients::Shapes large = {{"large", {512, 64}}};
      auto net = std::make_shared<PrescribedGradients>(large);
      DistributedDataParallel<PrescribedGradients> ddp(net, each_alone(r));
      auto state = std::make_shared<Int8State>();
      ddp.register_comm_hook(int8_quantize_hook(state));
      net->loss(gradients_in(large, r.rank, 0)).backward();
      const auto n64 = static_cast<std::uint64_t>(r.size);
      EXPECT_EQ(state->traffic().plain_bytes, 2 * (n64 - 1) * 512 * 64 * 4 / n64);
      EXPECT_NEAR(state->traffic().compression_rate(), 4 / (1 + 4 / 256.0), 0.05);
    });
  }
}

TEST(DdpInt8, WithErrorFeedbackErrorsDoNotAddUp) {
  run_ranks({.n = 3}, [](Rank& r) {
    constexpr int kSteps = 20;
    const auto all = of_all(r.size, 0);
    double drift[2] = {0, 0};
    for (const bool feedback : {false, true}) {
      auto net = std::make_shared<PrescribedGradients>(kShapes);
      DistributedDataParallel<PrescribedGradients> ddp(net, each_alone(r));
      auto state = std::make_shared<Int8State>(Int8Options{.block_size = kBlock, .use_error_feedback = feedback});
      ddp.register_comm_hook(int8_quantize_hook(state));
      torch::Tensor sum = torch::zeros({10, 30}, torch::kFloat64);
      for (int step = 0; step < kSteps; ++step) {
        net->zero_grad();
        net->loss(all[static_cast<std::size_t>(r.rank)]).backward();
        sum += net->named_parameters()["a"].grad().cpu();
      }
      drift[feedback ? 1 : 0] = ((sum - kSteps * mean_of(all).at("a")).abs() / bound_of(all, "a")).max().item<double>();
      if (!feedback) continue;
      // The memory goes out and comes in by name.
      state->average_errors(*r.world);
      auto other = std::make_shared<Int8State>(state->options());
      other->load_state_dict(state->state_dict());
      EXPECT_TRUE(torch::equal(other->state_dict().at("error/a"), state->state_dict().at("error/a")));
      EXPECT_THROW(other->load_state_dict({{"q/a", torch::zeros({1})}}), InvalidArgument);
    }
    EXPECT_LE(drift[1], 3) << "bounds of one step";
    EXPECT_GT(drift[0], 2 * drift[1]);
  });
}

TEST(DdpInt8, ABlockThatIsNotFiniteIsNanOnAllRanks) {
  for (const bool feedback : {false, true}) {
    run_ranks({.n = 3}, [feedback](Rank& r) {
      auto net = std::make_shared<PrescribedGradients>(kShapes);
      DistributedDataParallel<PrescribedGradients> ddp(net, each_alone(r));
      ddp.register_comm_hook(int8_quantize_hook(
          std::make_shared<Int8State>(Int8Options{.block_size = kBlock, .use_error_feedback = feedback})));
      for (int step = 0; step < 3; ++step) {
        Gradients prescribed = gradients_in(kShapes, r.rank, step);
        if (step == 1 && r.rank == 1) prescribed["d"][20] = std::numeric_limits<double>::infinity();
        if (step == 1 && r.rank == 2) prescribed["d"][128] = std::numeric_limits<double>::quiet_NaN();
        net->zero_grad(true);
        net->loss(prescribed).backward();
        const torch::Tensor bad = torch::isnan(net->named_parameters()["d"].grad()).cpu();
        torch::Tensor expected = torch::zeros({129}, torch::kBool);
        if (step == 1) expected.narrow(0, 16, 16).fill_(true);
        if (step == 1) expected.narrow(0, 128, 1).fill_(true);
        EXPECT_TRUE(torch::equal(bad, expected)) << "step " << step;
        EXPECT_TRUE(torch::isfinite(net->named_parameters()["a"].grad()).all().item<bool>());
      }
    });
  }
  EXPECT_THROW(Int8State({.block_size = 0}), InvalidArgument);
  EXPECT_THROW(int8_quantize_hook(nullptr), InvalidArgument);
}

TEST(BlockQuantize, EdgesOfTheRange) {
  const auto there_and_back = [](std::vector<float> numbers, std::size_t block) {
    std::vector<std::uint8_t> coded(coded_bytes(blocks_of(numbers.size(), block), block), 0xee);
    quantize_blocks(numbers, block, coded);
    std::vector<float> result(numbers.size(), 0);
    add_quantized(coded, block, result);
    return result;
  };
  EXPECT_TRUE(there_and_back({}, 4).empty());
  EXPECT_EQ(there_and_back({0, 0, 0}, 4), (std::vector<float>{0, 0, 0}));
  EXPECT_EQ(there_and_back({127, -127, 1, -64, 254, 2}, 4), (std::vector<float>{127, -127, 1, -64, 254, 2}));
  EXPECT_EQ(there_and_back({1e-37f, -1e-40f}, 2), (std::vector<float>{0, 0})) << "below the smallest block";
  const auto tiny = there_and_back({2e-36f, -1e-36f}, 2);
  EXPECT_NEAR(tiny[0] / 2e-36f, 1, 0.01);
  EXPECT_NEAR(tiny[1] / 1e-36f, -1, 0.01);
  const auto huge = there_and_back({3.4e38f, -3.4e38f, 1.7e38f}, 3);
  EXPECT_NEAR(huge[0] / 3.4e38f, 1, 1e-5);
  EXPECT_NEAR(huge[1] / 3.4e38f, -1, 1e-5);
  EXPECT_NEAR(huge[2] / 1.7e38f, 1, 0.01);
}

// What is computed on GPUs, against what is computed on the CPU.
TEST(BlockQuantize, ByTensorsAsByNumbers) {
  constexpr float kBad = std::numeric_limits<float>::infinity();
  for (const std::int64_t block : {1, 4, 7, 256}) {
    for (const std::int64_t count : {0, 1, 5, 28, 300}) {
      torch::Tensor numbers = (torch::sin(torch::arange(count) * 1.3) * torch::exp(torch::arange(count) % 40 - 20.0));
      numbers = numbers.to(torch::kFloat32);
      if (count == 28) numbers[9] = kBad;
      if (count == 300) numbers.narrow(0, 256, 44).mul_(1e-37);
      const auto size = static_cast<std::size_t>(count), length = static_cast<std::size_t>(block);
      std::vector<std::uint8_t> coded(coded_bytes(blocks_of(size, length), length));
      quantize_blocks({numbers.data_ptr<float>(), size}, length, coded);
      std::vector<float> expected(size, 1);
      add_quantized(coded, length, expected);

      const torch::Tensor rows = quantized_rows(numbers.to(training_device()), block);
      EXPECT_EQ(rows.numel(), static_cast<std::int64_t>(coded.size()));
      const torch::Tensor actual = torch::ones({count}, training_device());
      add_quantized_rows(rows, block, actual);
      EXPECT_TRUE(torch::allclose(actual.cpu(), torch::tensor(expected), 1e-6, 1e-7, /*equal_nan=*/true))
          << count << " numbers in blocks of " << block;
    }
  }
}

TEST(DdpPostLocalSgd, FirstOverAllThenOverFew) {
  for (const int n : {1, 2, 3, 4}) {
    for (const bool near : {true, false}) {
      run_ranks({.n = n}, [near](Rank& r) {
        const auto pair = r.world->split(r.rank / 2);
        auto net = std::make_shared<PrescribedGradients>(kShapes);
        DistributedDataParallel<PrescribedGradients> ddp(net,
                                                         each_alone(r, r.size == 3 ? Overlap::thread : Overlap::none));
        auto state = std::make_shared<PostLocalSGDState>(
            PostLocalSGDOptions{.subgroup = near ? pair : nullptr, .start_localSGD_iter = 2});
        ddp.register_comm_hook(post_localSGD_hook(state));
        for (int step = 0; step < 4; ++step) {
          net->zero_grad();
          net->loss(gradients_in(kShapes, r.rank, step)).backward();
          std::vector<Gradients> taking_part;
          for (int other = 0; other < r.size; ++other) {
            const bool with = step < 2 || (near ? other / 2 == r.rank / 2 : other == r.rank);
            if (with) taking_part.push_back(gradients_in(kShapes, other, step));
          }
          expect_close(gradients_of(*net), mean_of(taking_part), 2e-6);
        }
        EXPECT_EQ(state->iteration(), 4);
        if (r.size == 4) {
          EXPECT_NEAR(state->traffic().compression_rate(), near ? 1.2 : 2, 1e-6);
        }
      });
    }
  }
  EXPECT_THROW(PostLocalSGDState({.start_localSGD_iter = -1}), InvalidArgument);
  EXPECT_THROW(post_localSGD_hook(nullptr), InvalidArgument);
}

TEST(ModelAverager, AveragesInItsPeriodOnly) {
  run_ranks({.n = 3}, [](Rank& r) {
    PeriodicModelAverager averager({.period = 3, .warmup_steps = 2, .group = r.world});
    const torch::Tensor one = torch::empty({3, 2}, training_device()).requires_grad_();
    const torch::Tensor other = torch::empty({4, 2}, training_device()).t();
    for (int call = 0; call < 9; ++call) {
      {
        const torch::NoGradGuard no_grad;
        one.fill_(r.rank);
        other.fill_(10 * r.rank);
      }
      EXPECT_EQ(averager.step(), call);
      const bool averaged = averager.average_parameters({one, other});
      EXPECT_EQ(averaged, call == 2 || call == 5 || call == 8);
      EXPECT_EQ(one.max().item<double>(), averaged ? 1 : r.rank);
      EXPECT_EQ(other.min().item<double>(), averaged ? 10 : 10 * r.rank);
    }
    averager.set_step(2);
    EXPECT_TRUE(averager.average_parameters({})) << "nothing to average is fine";
    EXPECT_THROW(averager.set_step(-1), InvalidArgument);
    EXPECT_THROW(PeriodicModelAverager({.period = 0, .group = r.world}), InvalidArgument);
    EXPECT_THROW(PeriodicModelAverager({.warmup_steps = -1, .group = r.world}), InvalidArgument);
    const Caught caught = catch_error([] { PeriodicModelAverager({.period = 1}); });
    EXPECT_TRUE(contains(caught.text, "init_process_group")) << caught;
  });
}

TEST(DdpPostLocalSgd, TrainsWithItsOptimizer) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto net = std::make_shared<NetImpl>();
    fill(*net, 3);
    DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
    ddp.register_comm_hook(
        post_localSGD_hook(std::make_shared<PostLocalSGDState>(PostLocalSGDOptions{.start_localSGD_iter = 4})));
    torch::optim::SGD local(net->parameters(), 0.1);
    PostLocalSGDOptimizer optimizer(local, PeriodicModelAverager({.period = 4, .warmup_steps = 4, .group = r.world}));
    double first = 0, last = 0;
    int apart = 0;
    for (int step = 0; step < 61; ++step) {
      optimizer.zero_grad();
      const torch::Tensor loss = loss_of(ddp->forward(numbers({8, 8}, r.rank)) - 0.5);
      loss.backward();
      optimizer.step();
      (step == 0 ? first : last) = loss.item<double>();
      torch::Tensor root = net->fc1->weight.detach().clone();
      broadcast(root, 0, {.group = r.world});
      const bool same = torch::equal(root, net->fc1->weight);
      if (r.rank == 1 && !same) ++apart;
      if (step < 5 || step % 4 == 0) {
        EXPECT_TRUE(same) << step;
      }
    }
    if (r.rank == 1) {
      EXPECT_EQ(apart, 42) << "three of four steps are local";
    }
    EXPECT_LT(last, 0.2 * first);
  });
}

}  // namespace
}  // namespace maniple::harness::ddp_hooks_test
