// Ranks with different numbers of batches: with_uneven_inputs against one process that does what all ranks do together.
#include "comm/base/format.h"
#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::ddp_uneven_inputs_test {
namespace {

using Batches = std::vector<int>;  // of each rank

torch::Tensor batch_of(int rank, int step) { return numbers({4, 8}, 31 * step + rank); }

std::shared_ptr<NetImpl> net_with_seed(int seed) {
  auto net = std::make_shared<NetImpl>(16, true);
  fill(*net, seed);
  return net;
}

/// An epoch of all ranks in one process. Batch norm's statistics come from the first rank that still trains.
void train_alone(NetImpl& net, torch::optim::Optimizer& optimizer, const Batches& batches, bool by_initial,
                 const std::vector<double>& weights = {}) {
  const int steps = *std::max_element(batches.begin(), batches.end());
  for (int step = 0; step < steps; ++step) {
    std::vector<int> active;
    double total = 0;
    for (int r = 0; r < static_cast<int>(batches.size()); ++r) {
      if (batches[static_cast<std::size_t>(r)] <= step) continue;
      active.insert(active.begin(), r);
      total += weights.empty() ? 1 : weights[static_cast<std::size_t>(r)];
    }
    if (weights.empty() && by_initial) total = static_cast<double>(batches.size());
    net.zero_grad();
    std::vector<torch::Tensor> before;
    for (const torch::Tensor& buffer : net.buffers()) before.push_back(buffer.clone());
    for (const int r : active) {  // the last one's statistics stay
      for (std::size_t i = 0; i < before.size(); ++i) net.buffers()[i].copy_(before[i]);
      const double weight = weights.empty() ? 1 : weights[static_cast<std::size_t>(r)];
      (loss_of(net.forward(batch_of(r, step))) * (weight / total)).backward();
    }
    optimizer.step();
  }
}

void train_own(Rank& r, DistributedDataParallel<NetImpl>& ddp, torch::optim::Optimizer* optimizer,
               const Batches& batches) {
  for (int step = 0; step < batches[static_cast<std::size_t>(r.rank)]; ++step) {
    ddp->zero_grad();
    loss_of(ddp->forward(batch_of(r.rank, step))).backward();
    if (optimizer != nullptr) optimizer->step();
  }
}

void expect_same_model(Rank& r, const NetImpl& net, const NetImpl& expected, double tolerance = 1e-5) {
  expect_same_everywhere(r, net, false);
  const auto compare = [&](const auto& own, const auto& other) {
    for (const auto& item : other) {
      const torch::Tensor difference = own[item.key()].to(torch::kFloat64) - item.value().to(torch::kFloat64);
      EXPECT_LE(difference.abs().max().template item<double>(), tolerance) << item.key();
    }
  };
  compare(net.named_parameters(), expected.named_parameters());
  compare(net.named_buffers(), expected.named_buffers());
}

struct Pattern {
  Batches batches;
  bool by_initial = true;
  DdpOptions options = {};
};

std::vector<Pattern> patterns() {
  std::vector<Pattern> all;
  for (const bool by_initial : {true, false}) {
    for (const Batches& batches : std::vector<Batches>{
             {0}, {3}, {2, 0}, {0, 2}, {3, 3}, {0, 0}, {1, 4, 2}, {0, 0, 3}, {2, 2, 1}, {5, 0, 1, 2}, {1, 1, 0, 1}}) {
      all.push_back({batches, by_initial});
    }
  }
  const DdpOptions many{.bucket_cap_mb = kTiny, .first_bucket_mb = kTiny};
  for (const Batches& batches : std::vector<Batches>{{0, 3}, {3, 1, 2}, {0, 2, 0, 4}}) {
    DdpOptions options = many;
    options.overlap = batches.size() == 3 ? Overlap::inline_ : Overlap::thread;
    all.push_back({batches, false, options});
    options.find_unused_parameters = true;
    all.push_back({batches, true, options});
    options.find_unused_parameters = false;
    options.static_graph = true;
    all.push_back({batches, false, options});
    options.gradient_as_bucket_view = false;
    all.push_back({batches, true, options});
  }
  return all;
}

TEST(DdpUnevenInputs, AllRanksEndWithTheModelOfOneProcess) {
  for (const Pattern& pattern : patterns()) {
    SCOPED_TRACE(format_text("batches {}, overlap {}, by initial {}", joined(pattern.batches, " "),
                             static_cast<int>(pattern.options.overlap), pattern.by_initial));
    run_ranks({.n = static_cast<int>(pattern.batches.size())}, [&](Rank& r) {
      const auto net = net_with_seed(3 + r.rank), alone = net_with_seed(3);
      DdpOptions options = pattern.options;
      options.group = r.world;
      DistributedDataParallel<NetImpl> ddp(net, options);
      torch::optim::SGD optimizer(net->parameters(), 0.05), reference(alone->parameters(), 0.05);
      // Two epochs: in the second one other ranks have more.
      for (const Batches& batches : {pattern.batches, Batches(pattern.batches.rbegin(), pattern.batches.rend())}) {
        with_uneven_inputs(ddp, {.divide_by_initial_world_size = pattern.by_initial},
                           [&] { train_own(r, ddp, &optimizer, batches); });
        train_alone(*alone, reference, batches, pattern.by_initial);
        expect_same_model(r, *net, *alone);
      }
      // And as many without it.
      const Batches even(pattern.batches.size(), 2);
      train_own(r, ddp, &optimizer, even);
      train_alone(*alone, reference, even, true);
      expect_same_model(r, *net, *alone);
    });
  }
}

// With momentum a rank that only watched would take other steps afterwards.
TEST(DdpUnevenInputs, AShadowStepKeepsTheOptimizerUp) {
  for (const Batches& epoch : std::vector<Batches>{{3, 1}, {0, 2, 4}}) {
    run_ranks({.n = static_cast<int>(epoch.size())}, [&](Rank& r) {
      const auto net = net_with_seed(3), alone = net_with_seed(3);
      DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
      const auto options = torch::optim::SGDOptions(0.05).momentum(0.9);
      torch::optim::SGD optimizer(net->parameters(), options), reference(alone->parameters(), options);
      for (int repeat = 0; repeat < 3; ++repeat) {
        const auto shadow_step = [&](const std::function<void()>& backward) {
          optimizer.zero_grad();
          backward();
          optimizer.step();
        };
        with_uneven_inputs(ddp, {.shadow_step = shadow_step}, [&] { train_own(r, ddp, &optimizer, epoch); });
        train_alone(*alone, reference, epoch, true);
        expect_same_model(r, *net, *alone);
      }
    });
  }
}

// Applied in backward, the optimizer keeps up by itself.
TEST(DdpUnevenInputs, WithTheOptimizerInBackward) {
  for (const Overlap overlap : {Overlap::none, Overlap::thread}) {
    run_ranks({.n = 3}, [overlap](Rank& r) {
      const Batches epoch = {2, 0, 4};
      const auto net = net_with_seed(3), alone = net_with_seed(3);
      DistributedDataParallel<NetImpl> ddp(
          net, {.bucket_cap_mb = kTiny, .first_bucket_mb = kTiny, .group = r.world, .overlap = overlap});
      const auto options = torch::optim::SGDOptions(0.05).momentum(0.9);
      ddp.apply_optimizer_in_backward([&](const std::string&, const torch::Tensor& parameter) {
        return std::make_shared<torch::optim::SGD>(std::vector<torch::Tensor>{parameter}, options);
      });
      torch::optim::SGD reference(alone->parameters(), options);
      for (int repeat = 0; repeat < 3; ++repeat) {
        with_uneven_inputs(ddp, [&] { train_own(r, ddp, nullptr, epoch); });
        train_alone(*alone, reference, epoch, true);
        expect_same_model(r, *net, *alone);
      }
    });
  }
}

TEST(DdpUnevenInputs, WeightsAndHooks) {
  run_ranks({.n = 3}, [](Rank& r) {
    const Batches epoch = {1, 3, 0};
    const std::vector<double> weights = {3, 1, 2};
    {
      const auto net = net_with_seed(3), alone = net_with_seed(3);
      DistributedDataParallel<NetImpl> ddp(net, {.group = r.world, .average = Average::samples});
      torch::optim::SGD optimizer(net->parameters(), 0.05), reference(alone->parameters(), 0.05);
      ddp.set_weight(weights[static_cast<std::size_t>(r.rank)]);
      with_uneven_inputs(ddp, [&] { train_own(r, ddp, &optimizer, epoch); });
      train_alone(*alone, reference, epoch, true, weights);
      expect_same_model(r, *net, *alone);
    }
    for (const NamedCommHook& hook : comm_hooks()) {
      const auto net = net_with_seed(3), alone = net_with_seed(3);
      DistributedDataParallel<NetImpl> ddp(net, {.group = r.world, .overlap = Overlap::thread});
      if (std::string(hook.name) == "powerSGD") {
        ddp.register_comm_hook(powerSGD_hook(std::make_shared<PowerSGDState>(
            PowerSGDOptions{.matrix_approximation_rank = 4, .start_powerSGD_iter = 0, .min_compression_rate = 0.5})));
      } else {
        ddp.register_comm_hook(hook.make());
      }
      torch::optim::SGD optimizer(net->parameters(), 0.05), reference(alone->parameters(), 0.05);
      with_uneven_inputs(ddp, [&] { train_own(r, ddp, &optimizer, epoch); });
      train_alone(*alone, reference, epoch, true);
      expect_same_model(r, *net, *alone, 2e-2);
    }
  });
}

TEST(DdpUnevenInputs, AccumulationCountsSynchronisedBackwards) {
  run_ranks({.n = 2}, [](Rank& r) {
    const auto net = net_with_seed(3);
    DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
    torch::optim::SGD optimizer(net->parameters(), 0.05);
    with_uneven_inputs(ddp, [&] {
      for (int step = 0; step < 1 + r.rank; ++step) {
        optimizer.zero_grad();
        for (int part = 0; part < 3; ++part) {
          std::optional<NoSync> guard;
          if (part < 2) guard.emplace(ddp.reducer());
          loss_of(ddp->forward(batch_of(r.rank, part))).backward();
        }
        optimizer.step();
      }
    });
    expect_same_everywhere(r, *net, false);
    EXPECT_EQ(ddp.statistics().backwards, static_cast<std::uint64_t>(1 + r.rank));
  });
}

TEST(DdpUnevenInputs, SeveralModulesInOneStep) {
  run_ranks({.n = 2}, [](Rank& r) {
    const auto one = net_with_seed(3), two = net_with_seed(5);
    DistributedDataParallel<NetImpl> a(one, {.group = r.world}), b(two, {.group = r.world});
    torch::optim::SGD first(one->parameters(), 0.05), second(two->parameters(), 0.05);
    with_uneven_inputs({&a, &b}, {}, [&] {
      for (int step = 0; step < 3 * r.rank; ++step) {
        train_own(r, a, &first, {1, 1});
        train_own(r, b, &second, {1, 1});
      }
    });
    expect_same_everywhere(r, *one, false);
    expect_same_everywhere(r, *two, false);
    EXPECT_THROW(with_uneven_inputs(std::vector<GradientAverager*>{}, {}, [] {}), InvalidArgument);
  });
}

TEST(DdpUnevenInputs, MayThrowOnEarlyTermination) {
  for (const Batches& batches : std::vector<Batches>{{2, 5, 5}, {0, 1, 1}, {4, 4, 1}}) {
    run_ranks({.n = 3}, [&](Rank& r) {
      const auto net = net_with_seed(3);
      DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
      torch::optim::SGD optimizer(net->parameters(), 0.05);
      std::string text;
      try {
        with_uneven_inputs(ddp, {.throw_on_early_termination = true}, [&] { train_own(r, ddp, &optimizer, batches); });
      } catch (const UnevenInputs& error) {
        text = error.what();
      }
      const int first = batches[0] < batches[2] ? 0 : 2;
      EXPECT_TRUE(contains(text, format_text("rank {} has no more batches", first))) << text;
      expect_same_everywhere(r, *net, false);  // no rank was ahead, and the group works
      // All have the same number of batches: no reason to throw.
      with_uneven_inputs(ddp, {.throw_on_early_termination = true}, [&] { train_own(r, ddp, &optimizer, {2, 2, 2}); });
      with_uneven_inputs(ddp, {.enable = false}, [&] { train_own(r, ddp, &optimizer, {1, 1, 1}); });
      expect_same_everywhere(r, *net, false);
    });
  }
}

TEST(DdpUnevenInputs, InvalidUseThrows) {
  run_ranks({.n = 2}, [](Rank& r) {
    const auto net = net_with_seed(3);
    DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
    with_uneven_inputs(ddp, [&] { EXPECT_THROW(with_uneven_inputs(ddp, [] {}), InvalidArgument) << "nested"; });
    const Caught caught = catch_error([&] {
      with_uneven_inputs(ddp, {.shadow_step = [](const std::function<void()>&) {}},
                         [&] { train_own(r, ddp, nullptr, {0, 2}); });
    });
    EXPECT_TRUE(contains(caught.text, "shadow_step did not call backward")) << caught;
  });
}

// ---- Without with_uneven_inputs -------------------------------------------------------------------------------------

TEST(DdpWithoutUnevenInputs, ARankThatWentElsewhereIsNamed) {
  for (const Overlap overlap : {Overlap::none, Overlap::inline_, Overlap::thread}) {
    run_ranks({.n = 3}, [overlap](Rank& r) {
      const auto net = net_with_seed(3);
      DistributedDataParallel<NetImpl> ddp(net, {.group = r.world, .overlap = overlap});
      const Caught caught = catch_error([&] {
        train_own(r, ddp, nullptr, {4, 2, 4});
        r.world->barrier();
      });
      EXPECT_TRUE(caught.is(ErrorKind::mismatch)) << caught;
      ASSERT_EQ(caught.info.calls.size(), 3u) << caught;
      for (const RankCall& call : caught.info.calls)
        EXPECT_EQ(contains(call.place, "the backward of DistributedDataParallel"), call.rank != 1)
            << call.rank << ": " << call.place;
      if (r.rank != 1) {
        EXPECT_TRUE(contains(caught.text, "rank 1 has no more batches?")) << caught;
      }
      if (r.rank != 1) {
        EXPECT_TRUE(contains(caught.text, "with_uneven_inputs")) << caught;
      }
    });
  }
}

TEST(DdpWithoutUnevenInputs, ARankThatLeftIsNamed) {
  for (const Overlap overlap : {Overlap::none, Overlap::thread}) {
    run_ranks({.n = 3}, [overlap](Rank& r) {
      const auto net = net_with_seed(3);
      std::optional<DistributedDataParallel<NetImpl>> ddp;
      ddp.emplace(net, DdpOptions{.group = r.world, .overlap = overlap});
      const Caught caught = catch_error([&] { train_own(r, *ddp, nullptr, {4, 4, 2}); });
      if (r.rank == 2) {
        EXPECT_FALSE(caught.any) << caught;
        ddp.reset();
        r.world.reset();
        return;
      }
      EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
      EXPECT_EQ(caught.info.loss, LossKind::left) << caught;
      EXPECT_TRUE(
          contains(caught.text, "its own output says whether it failed; if it did not: rank 2 has no more batches?"))
          << caught;
    });
  }
}

TEST(DdpWithoutUnevenInputs, ARankThatDoesNotArriveIsNamedInTime) {
  // On a GPU the start alone may take a second.
  run_ranks({.n = 2, .timeout = std::chrono::seconds(training_device().is_cpu() ? 1 : 10)}, [](Rank& r) {
    const auto net = net_with_seed(3);
    DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
    const Caught caught = catch_error([&] {
      train_own(r, ddp, nullptr, {2, 1});
      if (r.rank != 0 || training_device().is_cpu()) return;
      torch::cuda::synchronize();  // on a GPU it was only enqueued: the next call throws
      train_own(r, ddp, nullptr, {1, 1});
    });
    if (r.rank == 0) {
      EXPECT_TRUE(caught.is(ErrorKind::timeout)) << caught;
      EXPECT_EQ(caught.info.ranks, std::vector<int>{1}) << caught;
      EXPECT_TRUE(contains(caught.text, "rank 1 has no more batches?")) << caught;
    }
    r.phase("rank 0 has its error");
  });
}

}  // namespace
}  // namespace maniple::harness::ddp_uneven_inputs_test
