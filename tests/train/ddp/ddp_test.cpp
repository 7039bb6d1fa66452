// DistributedDataParallel against its definition: n ranks on shards of a batch get the gradients of one process on the
// whole batch.
#include <set>

#include "comm/base/format.h"
#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::ddp_test {
namespace {

using namespace maniple::testing_models;

struct Setting {
  std::string name;
  int n = 2;
  DdpOptions options = {};
  torch::ScalarType dtype = torch::kFloat32;
  const char* hook = nullptr;
  double more_tolerance = 0;
};

class Parity : public testing::TestWithParam<Setting> {};

TEST_P(Parity, GradientsEqualThoseFromTheWholeBatch) {
  const Setting& setting = GetParam();
  const torch::Tensor batch = numbers({12, 8}).to(setting.dtype);
  run_ranks({.n = setting.n}, [&](Rank& r) {
    auto whole = std::make_shared<NetImpl>();
    fill(*whole, 3);
    whole->to(setting.dtype);
    auto net = std::make_shared<NetImpl>();
    fill(*net, 3 + r.rank);  // only rank 0's survive
    net->to(setting.dtype);
    DdpOptions options = setting.options;
    options.group = r.world;
    if (!options.init_sync) fill(*net, 3);
    DistributedDataParallel<NetImpl> ddp(net, options);
    if (setting.hook != nullptr) ddp.register_comm_hook(comm_hook_named(setting.hook));

    torch::optim::SGD whole_optimizer(whole->parameters(), 0.1), optimizer(net->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      whole->zero_grad();
      loss_of(whole->forward(batch)).backward();
      if (step % 2 == 0) net->zero_grad();
      if (step % 2 == 1) net->zero_grad(true);  // gradients are none and come back elsewhere
      loss_of(ddp->forward(shard(batch, r.rank, r.size))).backward();
      expect_close(gradients_of(*net), gradients_of(*whole), tolerance(setting.dtype) + setting.more_tolerance);
      expect_same_everywhere(r, *net);
      whole_optimizer.step();
      optimizer.step();
    }
    expect_same_everywhere(r, *net, false);
    const DdpStatistics statistics = ddp.statistics();
    EXPECT_EQ(statistics.backwards, 4u);
    EXPECT_EQ(statistics.ranks, r.size);
    std::set<std::string> all;
    for (const auto& bucket : statistics.buckets) all.insert(bucket.parameters.begin(), bucket.parameters.end());
    EXPECT_EQ(all, (std::set<std::string>{"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}));
    EXPECT_GE(statistics.overlap_fraction(), 0);
    EXPECT_FALSE(statistics.text().empty());
  });
}

std::vector<Setting> parity_settings() {
  std::vector<Setting> all;
  for (const int n : {1, 2, 3, 4}) {
    for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16}) {
      all.push_back({format_text("{}Ranks{}", n, c10::toString(dtype)), n, {}, dtype});
    }
    all.push_back({format_text("{}RanksInlineManyBuckets", n),
                   n,
                   {.bucket_cap_mb = kTiny, .first_bucket_mb = kTiny, .overlap = Overlap::inline_}});
    all.push_back({format_text("{}RanksThreadManyBuckets", n),
                   n,
                   {.bucket_cap_mb = kTiny, .first_bucket_mb = kTiny, .overlap = Overlap::thread}});
    all.push_back({format_text("{}RanksFindUnused", n),
                   n,
                   {.bucket_cap_mb = kTiny, .find_unused_parameters = true, .overlap = Overlap::inline_}});
  }
  all.push_back({"ManyBucketsAtTheEnd", 2, {.bucket_cap_mb = kTiny, .first_bucket_mb = 0}});
  all.push_back({"StaticGraph", 2, {.static_graph = true, .overlap = Overlap::inline_}});
  all.push_back({"StaticGraphThread", 3, {.bucket_cap_mb = kTiny, .static_graph = true, .overlap = Overlap::thread}});
  all.push_back({"NoViews", 2, {.gradient_as_bucket_view = false}});
  all.push_back(
      {"NoViewsThread", 3, {.bucket_cap_mb = kTiny, .gradient_as_bucket_view = false, .overlap = Overlap::thread}});
  all.push_back({"NoInitSync", 2, {.init_sync = false}});
  all.push_back({"NoBuffers", 2, {.broadcast_buffers = false}});
  all.push_back({"EqualWeights", 3, {.average = Average::samples}});
  for (const NamedCommHook& hook : comm_hooks()) {
    const double rounding = std::string(hook.name) == "all_reduce" ? 0 : std::string(hook.name) == "fp16" ? 2e-3 : 2e-2;
    all.push_back({format_text("Hook_{}", hook.name), 2, {}, torch::kFloat32, hook.name, rounding});
    all.push_back({format_text("Hook_{}_thread", hook.name),
                   3,
                   {.bucket_cap_mb = kTiny, .overlap = Overlap::thread},
                   torch::kFloat64,
                   hook.name,
                   rounding});
  }
  return all;
}
std::string setting_name(const testing::TestParamInfo<Setting>& setting) { return setting.param.name; }
INSTANTIATE_TEST_SUITE_P(Ddp, Parity, testing::ValuesIn(parity_settings()), setting_name);

// Sums of small whole numbers and divisions by two are exact, so the bits must equal one process's.
TEST(Ddp, IsBitExactWhereArithmeticIs) {
  run_ranks({.n = 2}, [](Rank& r) {
    const torch::Tensor batch = torch::arange(32, torch::kFloat32).view({4, 8}) - 16;
    torch::nn::Linear whole(8, 4), net(8, 4);
    for (auto* module : {&whole, &net}) {
      const torch::NoGradGuard no_grad;
      (*module)->weight.copy_(torch::arange(32, torch::kFloat32).view({4, 8}));
      (*module)->bias.fill_(1);
    }
    whole->forward(batch).sum().backward();
    DistributedDataParallel ddp(net, {.group = r.world});
    (ddp->forward(shard(batch, r.rank, 2)).sum() * 2).backward();  // the average of twice the halves is the sum
    expect_identical(gradients_of(*net), gradients_of(*whole));
  });
}

std::vector<torch::Tensor> trained_once(Rank& r, Overlap overlap) {
  auto net = std::make_shared<NetImpl>(16, true);
  fill(*net, 5);
  DistributedDataParallel<NetImpl> ddp(net, {.bucket_cap_mb = kTiny, .group = r.world, .overlap = overlap});
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < 5; ++step) {
    net->zero_grad();
    loss_of(ddp->forward(shard(numbers({12, 8}, step), r.rank, r.size))).backward();
    optimizer.step();
  }
  std::vector<torch::Tensor> result;
  for (const auto& parameter : net->parameters()) result.push_back(parameter.detach().clone());
  for (const auto& buffer : net->buffers()) result.push_back(buffer.clone());
  return result;
}

TEST(Ddp, TheSameBitsEveryTimeAndInEveryMode) {
  run_ranks({.n = 3}, [](Rank& r) {
    const auto first = trained_once(r, Overlap::none);
    for (const Overlap overlap : {Overlap::none, Overlap::inline_, Overlap::thread}) {
      const auto again = trained_once(r, overlap);
      for (std::size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(torch::equal(first[i], again[i])) << i;
    }
  });
}

TEST(Ddp, GradientsLiveInTheBucketsAndStayThere) {
  run_ranks({.n = 2}, [](Rank& r) {
    Net net;
    DistributedDataParallel ddp(net, {.group = r.world});
    loss_of(ddp->forward(numbers({4, 8}))).backward();
    const void* where = net->fc1->weight.grad().data_ptr();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();  // detaches them, and sets them to zero or (since 2.0) to none
      loss_of(ddp(numbers({4, 8}))).backward();
      EXPECT_EQ(net->fc1->weight.grad().data_ptr(), where);
    }
    EXPECT_EQ(ddp.statistics().buckets.size(), 1u);
    EXPECT_EQ(ddp.statistics().buckets[0].parameters.size(), 4u);
  });
}

TEST(Ddp, NoSyncAddsUpLocally) {
  for (const bool views : {true, false}) {
    run_ranks({.n = 2}, [views](Rank& r) {
      auto whole = std::make_shared<NetImpl>();
      auto net = std::make_shared<NetImpl>();
      fill(*whole, 3);
      fill(*net, 3);
      DistributedDataParallel<NetImpl> ddp(net, {.gradient_as_bucket_view = views, .group = r.world});
      for (int round = 0; round < 2; ++round) {
        whole->zero_grad();
        net->zero_grad(round == 1);
        Gradients local;
        for (int part = 0; part < 3; ++part) {
          const torch::Tensor batch = numbers({4, 8}, part);
          loss_of(whole->forward(batch)).backward();
          if (part == 2) {
            loss_of(ddp->forward(shard(batch, r.rank, 2))).backward();
            continue;
          }
          const auto guard = ddp.no_sync();
          const auto nested = ddp.no_sync();
          loss_of(ddp->forward(shard(batch, r.rank, 2))).backward();
          local = gradients_of(*net);
        }
        const torch::Tensor mine = local.at("fc2.weight");
        torch::Tensor other = mine.clone();
        broadcast(other, 1, {.group = r.world});
        if (r.rank == 0) {
          EXPECT_FALSE(torch::equal(mine, other)) << "no_sync communicated";
        }
        expect_close(gradients_of(*net), gradients_of(*whole), 1e-5);
        expect_same_everywhere(r, *net);
      }
      EXPECT_EQ(ddp.statistics().backwards, 2u);
    });
  }
}

TEST(Ddp, SeveralForwardsAndSeveralBackwards) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto whole = std::make_shared<NetImpl>();
    auto net = std::make_shared<NetImpl>();
    fill(*whole, 3);
    fill(*net, 3);
    DistributedDataParallel<NetImpl> ddp(net, {.bucket_cap_mb = kTiny, .group = r.world, .overlap = Overlap::inline_});
    const torch::Tensor a = numbers({4, 8}, 1), b = numbers({4, 8}, 2);
    for (int round = 0; round < 3; ++round) {
      whole->zero_grad();
      net->zero_grad();
      // Two forwards, one backward: every parameter is used twice in it.
      (loss_of(whole->forward(a)) + loss_of(whole->forward(b))).backward();
      (loss_of(ddp->forward(shard(a, r.rank, 2))) + loss_of(ddp->forward(shard(b, r.rank, 2)))).backward();
      expect_close(gradients_of(*net), gradients_of(*whole), 1e-5);
      // And another backward on top of it, before any step.
      loss_of(whole->forward(b)).backward();
      loss_of(ddp->forward(shard(b, r.rank, 2))).backward();
      expect_close(gradients_of(*net), gradients_of(*whole), 1e-5);
    }
  });
}

/// Rank 0's batch has 3 rows, rank 1's 1 row, rank 2's 4.
TEST(Ddp, BatchesOfDifferentSizesAreWeighted) {
  for (const Overlap overlap : {Overlap::none, Overlap::thread}) {
    run_ranks({.n = 3}, [overlap](Rank& r) {
      const std::int64_t rows[] = {3, 1, 4}, begin[] = {0, 3, 4};
      const torch::Tensor batch = numbers({8, 8}).to(torch::kFloat64);
      auto whole = std::make_shared<NetImpl>();
      auto net = std::make_shared<NetImpl>();
      for (auto* module : {&whole, &net}) {
        fill(**module, 3);
        (*module)->to(torch::kFloat64);
      }
      DistributedDataParallel<NetImpl> ddp(
          net, {.bucket_cap_mb = kTiny, .group = r.world, .overlap = overlap, .average = Average::samples});
      for (int step = 0; step < 2; ++step) {
        loss_of(whole->forward(batch)).backward();  // both accumulate
        ddp.set_weight(static_cast<double>(rows[r.rank]));
        loss_of(ddp->forward(batch.narrow(0, begin[r.rank], rows[r.rank]))).backward();
        expect_close(gradients_of(*net), gradients_of(*whole), 1e-12);
      }
      EXPECT_THROW(ddp.set_weight(-1), InvalidArgument);
    });
  }
}

TEST(Ddp, FrozenAndSharedParametersAndMixedDtypes) {
  struct Odd : torch::nn::Module {
    Odd() : one(register_module("one", torch::nn::Linear(8, 8))) {
      tied = register_parameter("tied", one->weight);
      frozen = register_parameter("frozen", torch::ones({8}), false);
      precise = register_parameter("precise", torch::ones({8}, torch::kFloat64));
      image = register_parameter("image", torch::ones({2, 3, 4, 5}).contiguous(torch::MemoryFormat::ChannelsLast));
      nothing = register_parameter("nothing", torch::zeros({0, 3}));
    }
    torch::Tensor forward(const torch::Tensor& x) {
      return torch::matmul(one->forward(x), tied) * frozen * precise.to(torch::kFloat32) + image.pow(2).mean() +
             nothing.sum();
    }
    torch::nn::Linear one;
    torch::Tensor tied, frozen, precise, image, nothing;
  };
  run_ranks({.n = 2}, [](Rank& r) {
    auto whole = std::make_shared<Odd>();
    auto net = std::make_shared<Odd>();
    for (auto* module : {&whole, &net}) fill(**module, 3);
    DistributedDataParallel<Odd> ddp(net, {.group = r.world, .overlap = Overlap::inline_});
    const torch::Tensor batch = numbers({4, 8});
    for (int step = 0; step < 3; ++step) {
      whole->zero_grad();
      net->zero_grad(step == 2);
      loss_of(whole->forward(batch)).backward();
      loss_of(ddp->forward(shard(batch, r.rank, 2))).backward();
      Gradients expected = gradients_of(*whole);
      expect_close(gradients_of(*net), expected, 1e-5);
      EXPECT_FALSE(net->frozen.grad().defined());
      EXPECT_EQ(net->image.grad().strides(), net->image.strides()) << "the gradient has the strides of its parameter";
    }
    const auto buckets = ddp.statistics().buckets;
    ASSERT_EQ(buckets.size(), 2u) << ddp.statistics().text();
    EXPECT_NE(buckets[0].dtype, buckets[1].dtype);
  });
}

TEST(Ddp, BuffersBecomeRankZerosAfterBackward) {
  run_ranks({.n = 3}, [](Rank& r) {
    for (const bool broadcast_them : {true, false}) {
      auto net = std::make_shared<NetImpl>(16, true);
      fill(*net, 3);
      net->norm->running_mean.fill_(r.rank);
      DistributedDataParallel<NetImpl> ddp(net, {.broadcast_buffers = broadcast_them, .group = r.world});
      EXPECT_EQ(net->norm->running_mean.abs().max().item<float>(), 0) << "at construction";
      for (int step = 0; step < 2; ++step) {
        // Two forwards before a backward: buffers must not change under autograd's feet.
        (loss_of(ddp->forward(numbers({4, 8}, r.rank))) + loss_of(ddp->forward(numbers({4, 8}, 9 + r.rank))))
            .backward();
      }
      torch::Tensor root = net->norm->running_mean.clone();
      broadcast(root, 0, {.group = r.world});
      EXPECT_EQ(torch::equal(root, net->norm->running_mean), broadcast_them || r.rank == 0);
      EXPECT_EQ(net->norm->num_batches_tracked.item<std::int64_t>(), 4);
    }
  });
}

TEST(Ddp, DeviceIdsAreOfOneGpu) {
  run_ranks({.n = 1}, [](Rank& r) {
    auto net = std::make_shared<NetImpl>();
    net->to(torch::kCPU);
    const auto text = [&](const std::vector<int>& ids) {
      return catch_error([&] { DistributedDataParallel<NetImpl>(net, {.group = r.world, .device_ids = ids}); }).text;
    };
    EXPECT_TRUE(contains(text({0}), "device_ids is {0}, but parameter fc1.weight is on cpu")) << text({0});
    EXPECT_TRUE(contains(text({0, 1}), "device_ids names 2 GPUs")) << text({0, 1});
  });
}

TEST(Ddp, GradientsAndModulesOutliveTheWrapper) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto net = std::make_shared<NetImpl>();
    {
      DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
      loss_of(ddp->forward(numbers({4, 8}))).backward();
      DistributedDataParallel<NetImpl> moved = std::move(ddp);
      loss_of(moved->forward(numbers({4, 8}))).backward();
      EXPECT_EQ(moved.statistics().backwards, 2u);
    }
    loss_of(net->forward(numbers({4, 8}, r.rank))).backward();  // the other ranks no longer take part
    EXPECT_TRUE(torch::isfinite(net->fc1->weight.grad()).all().item<bool>());
    net->zero_grad();
  });
}

}  // namespace
}  // namespace maniple::harness::ddp_test
