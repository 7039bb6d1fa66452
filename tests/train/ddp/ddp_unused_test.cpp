// Parameters that get no gradient in some backwards or on some ranks, and the order in which gradients come.
#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::ddp_unused_test {
namespace {

struct Branches : torch::nn::Module {
  Branches() {
    for (const char* name : {"a", "b", "c"}) register_module(name, torch::nn::Linear(8, 4));
  }
  torch::Tensor forward(const torch::Tensor& x, const std::vector<std::string>& names) {
    torch::Tensor sum = torch::zeros({x.size(0), 4}, x.options());
    for (const auto& name : names) sum = sum + named_children()[name]->as<torch::nn::Linear>()->forward(x);
    return sum;
  }
};

TEST(Ddp, UnusedParametersAreFoundOnEveryRank) {
  for (const Overlap overlap : {Overlap::none, Overlap::inline_, Overlap::thread}) {
    for (const bool views : {true, false}) {
      run_ranks({.n = 3}, [overlap, views](Rank& r) {
        auto net = std::make_shared<Branches>();
        fill(*net, 2);
        DistributedDataParallel<Branches> ddp(net, {.bucket_cap_mb = kTiny,
                                                    .first_bucket_mb = kTiny,
                                                    .find_unused_parameters = true,
                                                    .gradient_as_bucket_view = views,
                                                    .group = r.world,
                                                    .overlap = overlap});
        // The used parameters change from step to step; no rank uses "c" in the first two, all use it in the third.
        const std::vector<std::vector<std::string>> used[] = {
            {{"a"}, {"b"}, {"a", "b"}}, {{"b"}, {"b"}, {"a"}}, {{"c"}, {"c"}, {"c"}}, {{"a", "b", "c"}, {"a"}, {"c"}}};
        for (const auto& step : used) {
          net->zero_grad(true);
          Gradients expected;
          for (const std::string name : {"a", "b", "c"}) {
            for (const std::string part : {"weight", "bias"}) expected[name + "." + part] = torch::Tensor();
          }
          for (int other = 0; other < r.size; ++other) {
            Branches alone;
            fill(alone, 2);
            loss_of(alone.forward(numbers({4, 8}, other), step[static_cast<std::size_t>(other)])).backward();
            for (const auto& [name, gradient] : gradients_of(alone)) {
              if (!gradient.defined()) continue;
              expected[name] = expected[name].defined() ? expected[name] + gradient / r.size : gradient / r.size;
            }
          }
          loss_of(ddp->forward(numbers({4, 8}, r.rank), step[static_cast<std::size_t>(r.rank)])).backward();
          expect_close(gradients_of(*net), expected, 1e-5);
          expect_same_everywhere(r, *net);
        }
        // Unused parameters keep their bits.
        const torch::Tensor before = net->named_parameters()["c.weight"].grad().clone();
        loss_of(ddp.module()->forward(numbers({4, 8}), {"a"})).backward();
        EXPECT_TRUE(torch::equal(net->named_parameters()["c.weight"].grad(), before));
      });
    }
  }
}

// What each rank adds up under no_sync is its own, and the next synchronised backward averages it, used there or not.
TEST(Ddp, ParametersUsedOnlyUnderNoSyncAreAveraged) {
  for (const Overlap overlap : {Overlap::none, Overlap::inline_, Overlap::thread}) {
    for (const bool views : {true, false}) {
      run_ranks({.n = 3}, [overlap, views](Rank& r) {
        auto net = std::make_shared<Branches>();
        fill(*net, 2);
        DistributedDataParallel<Branches> ddp(net, {.bucket_cap_mb = kTiny,
                                                    .first_bucket_mb = kTiny,
                                                    .find_unused_parameters = true,
                                                    .gradient_as_bucket_view = views,
                                                    .group = r.world,
                                                    .overlap = overlap});
        const auto quiet = [](int rank) { return rank == 2 ? "a" : "b"; };  // rank 2 never uses b
        for (int step = 0; step < 3; ++step) {
          net->zero_grad(step == 1);
          Gradients expected;
          for (int other = 0; other < r.size; ++other) {
            Branches alone;
            fill(alone, 2);
            alone.zero_grad(true);
            loss_of(alone.forward(numbers({4, 8}, other + 10 * step), {quiet(other)})).backward();
            loss_of(alone.forward(numbers({4, 8}, other), {"a"})).backward();
            for (const auto& [name, gradient] : gradients_of(alone)) {
              const torch::Tensor part = gradient.defined() ? gradient / r.size : torch::Tensor();
              torch::Tensor& sum = expected[name];
              if (part.defined()) sum = sum.defined() ? sum + part : part;
            }
          }
          {
            const auto guard = ddp.no_sync();
            loss_of(ddp.module()->forward(numbers({4, 8}, r.rank + 10 * step), {quiet(r.rank)})).backward();
          }
          loss_of(ddp.module()->forward(numbers({4, 8}, r.rank), {"a"})).backward();
          expect_close(gradients_of(*net), expected, 1e-5);
          expect_same_everywhere(r, *net);
        }
        // What was added up and then thrown away is not used.
        {
          const auto guard = ddp.no_sync();
          loss_of(ddp.module()->forward(numbers({4, 8}, r.rank), {"c"})).backward();
        }
        net->zero_grad(true);
        loss_of(ddp.module()->forward(numbers({4, 8}, r.rank), {"a"})).backward();
        EXPECT_FALSE(net->named_parameters()["c.weight"].grad().defined());
      });
    }
  }
}

TEST(Ddp, AStaticGraphHoldsUnderNoSyncToo) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto net = std::make_shared<Branches>();
    fill(*net, 2);
    DistributedDataParallel<Branches> ddp(net, {.static_graph = true, .group = r.world});
    {
      const auto guard = ddp.no_sync();
      loss_of(ddp.module()->forward(numbers({4, 8}, r.rank), {"b"})).backward();
    }
    loss_of(ddp.module()->forward(numbers({4, 8}, r.rank), {"a"})).backward();
    expect_same_everywhere(r, *net);
    r.phase("the promise is broken");
    const auto guard = ddp.no_sync();
    const Caught caught = catch_error([&] { loss_of(ddp.module()->forward(numbers({4, 8}), {"a", "c"})).backward(); });
    EXPECT_TRUE(caught.any && contains(caught.text, "c.bias got a gradient under no_sync")) << caught;
  });
}

TEST(Ddp, AStaticGraphMayLeaveParametersOut) {
  for (const Overlap overlap : {Overlap::none, Overlap::inline_, Overlap::thread}) {
    run_ranks({.n = 2}, [overlap](Rank& r) {
      auto net = std::make_shared<Branches>();
      fill(*net, 2);
      DistributedDataParallel<Branches> ddp(net, {.bucket_cap_mb = kTiny,
                                                  .first_bucket_mb = kTiny,
                                                  .static_graph = true,
                                                  .group = r.world,
                                                  .overlap = overlap});
      const std::vector<std::string> mine =
          r.rank == 0 ? std::vector<std::string>{"a"} : std::vector<std::string>{"b", "a"};
      for (int step = 0; step < 3; ++step) {
        net->zero_grad(true);
        loss_of(ddp->forward(numbers({4, 8}, r.rank), mine)).backward();
        EXPECT_FALSE(net->named_parameters()["c.weight"].grad().defined());
        EXPECT_TRUE(net->named_parameters()["b.weight"].grad().defined()) << "rank 1 used it";
        expect_same_everywhere(r, *net);
      }
      r.phase("the promise is broken");
      const Caught caught =
          catch_error([&] { loss_of(ddp.module()->forward(numbers({4, 8}), {"a", "b", "c"})).backward(); });
      EXPECT_TRUE(caught.any && contains(caught.text, "static")) << caught;
    });
  }
}

TEST(Ddp, BucketsFollowTheOrderOfGradients) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto net = std::make_shared<Branches>();
    fill(*net, 2);
    DistributedDataParallel<Branches> ddp(net, {.bucket_cap_mb = kTiny, .first_bucket_mb = kTiny, .group = r.world});
    // Ranks use the branches in opposite orders; all follow rank 0, whose last branch comes first in backward.
    const std::vector<std::string> mine =
        r.rank == 0 ? std::vector<std::string>{"b", "c", "a"} : std::vector<std::string>{"a", "c", "b"};
    for (int step = 0; step < 2; ++step) loss_of(ddp->forward(numbers({4, 8}), mine)).backward();
    const auto buckets = ddp.statistics().buckets;
    ASSERT_EQ(buckets.size(), 6u);
    EXPECT_EQ(buckets.front().parameters.front()[0], 'a');
    EXPECT_EQ(buckets.back().parameters.front()[0], 'b');
  });
}

}  // namespace
}  // namespace maniple::harness::ddp_unused_test
