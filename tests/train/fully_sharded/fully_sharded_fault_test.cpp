// What goes wrong with fully sharded modules, and which error each rank gets.
#include <functional>

#include <gtest/gtest.h>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/models.h"
#include <maniple/maniple.h>

namespace maniple::harness::fully_sharded_fault_test {
namespace {

namespace nn = torch::nn;
using maniple::testing_models::numbers;
using maniple::testing_models::training_device;
using torch::Tensor;

constexpr std::chrono::seconds kLimit(180);  // a process that loads LibTorch takes seconds to start on a busy machine

nn::Linear layer(std::int64_t in = 4, std::int64_t out = 4) {
  nn::Linear made(in, out);
  made->to(training_device());
  return made;
}
Tensor input(int rank = 0) { return numbers({3, 4}, rank).to(training_device()); }

struct ThrowsImpl : nn::Module {
  Tensor forward(const Tensor& x) {
    if (throws) throw std::runtime_error("no such batch");
    return inner(x);
  }
  nn::Linear inner = register_module("inner", layer());
  bool throws = false;
};

TEST(FullyShardedFault, AKilledRankIsNamedByAllOthers) {
  for (const Overlap overlap : {Overlap::none, Overlap::thread}) {
    run_ranks({.n = 3, .as = As::processes, .limit = kLimit, .fault = kill_at(1, 4)}, [overlap](Rank& r) {
      const FullyShardOptions options{.group = r.world, .overlap = overlap};
      auto first = fully_shard(layer(), options), second = fully_shard(layer(), options);
      const Caught caught = catch_error([&] {
        for (;;) {
          const Tensor hidden = first(input(r.rank));
          hidden.register_hook([&r](const Tensor&) { r.step(); });  // inside backward, between the two units
          second(hidden).sum().backward();
        }
      });
      EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
      EXPECT_EQ(caught.lost_rank, 1) << caught;
      EXPECT_EQ(first->module()->weight.size(0), r.rank == 2 ? 0 : 2);  // rows again, not whole
      const Caught later = catch_error([&] { first(input(r.rank)); });
      EXPECT_TRUE(later.is(ErrorKind::aborted)) << later;
    });
  }
}

TEST(FullyShardedFault, AForwardThatThrowsEndsTheOthers) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto module = std::make_shared<ThrowsImpl>();
    auto first = fully_shard(module, {.group = r.world});
    auto second = fully_shard(layer(), {.group = r.world});
    module->throws = r.rank == 1;
    if (r.rank == 1) {
      EXPECT_THROW(second(first(input())), std::runtime_error);
      EXPECT_EQ(module->inner->weight.size(0), 2);
      return;
    }
    const Caught caught = catch_error([&] { second(first(input())); });
    EXPECT_TRUE(caught.is(ErrorKind::aborted)) << caught;
    EXPECT_TRUE(contains(caught.text, "forward of unit 0 (") && contains(caught.text, "failed on rank 1")) << caught;
  });
}

TEST(FullyShardedFault, AnotherOrderOfUnitsIsNamed) {
  for (const Overlap overlap : {Overlap::none, Overlap::thread}) {
    run_ranks({.n = 3}, [overlap](Rank& r) {
      const FullyShardOptions options{.group = r.world, .overlap = overlap};
      auto first = fully_shard(layer(), options), second = fully_shard(layer(), options);
      const torch::NoGradGuard no_grad;
      first(input());
      const Caught caught = catch_error([&] {
        if (r.rank == 1) {
          first(input());
        } else {
          second(input());
        }
        r.world->barrier();
      });
      EXPECT_TRUE(caught.is_one_of({ErrorKind::invalid_argument, ErrorKind::aborted})) << caught;
      EXPECT_TRUE(contains(caught.text, "all ranks call the same units in the same order")) << caught;
    });
  }
}

TEST(FullyShardedFault, ABackwardThatThrowsEndsTheOthers) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto first = fully_shard(layer(), {.group = r.world}), second = fully_shard(layer(), {.group = r.world});
    const auto run = [&] {
      const Tensor hidden = first(input());
      hidden.register_hook([&r](const Tensor&) {
        if (r.rank == 0) throw std::runtime_error("in the middle");
      });
      second(hidden).sum().backward();
    };
    if (r.rank == 0) {
      EXPECT_THROW(run(), std::runtime_error);
    } else {
      const Caught caught = catch_error(run);
      EXPECT_TRUE(caught.is(ErrorKind::aborted)) << caught;
      EXPECT_TRUE(contains(caught.text, "failed on rank 0")) << caught;
    }
    EXPECT_EQ(first->module()->weight.size(0), 2);
    EXPECT_EQ(second->module()->weight.size(0), 2);
  });
}

TEST(FullyShardedFault, UnsuitableModulesAreRefused) {
  run_ranks({.n = 2}, [](Rank& r) {
    const FullyShardOptions options{.group = r.world};
    const auto refused = [&](const auto& call, const std::string& part) {
      const Caught caught = catch_error(call);
      EXPECT_TRUE(caught.any && contains(caught.text, part)) << caught;
    };
    const nn::Linear one = layer();
    struct TiedImpl : nn::Module {
      explicit TiedImpl(const Tensor& given) : weight(register_parameter("weight", given)) {}
      Tensor forward(const Tensor& x) { return torch::linear(x, weight); }
      Tensor weight;
    };
    const auto tied = std::make_shared<TiedImpl>(one->weight);
    auto unit = fully_shard(one, options);
    refused([&] { fully_shard(tied, options); }, "belongs to fully_shard unit 0");
    refused([&] { fully_shard(unit.ptr(), options); }, "is a unit already");
    refused([&] { fully_shard(std::shared_ptr<nn::LinearImpl>(), options); }, "the module is null");
    refused([&] { unit->to(torch::kFloat64); }, "convert the module first");
    refused([&] { unit->clone(); }, "clone()");
    refused([&] { torch::save(unit.ptr(), r.dir() + "/net.pt"); }, "CheckpointOptions::sharded");
    refused([&] { fully_shard(layer(4, r.rank == 1 ? 5 : 4), options); }, "rank 1 has parameter");
    EXPECT_EQ(unit->module()->weight.size(0), 2);
  });
}

TEST(FullyShardedFault, MisuseOfAUnitIsAnError) {
  const auto expect = [](const std::function<void(FullySharded<nn::Linear>&, nn::Linear&)>& use,
                         const std::string& part) {
    run_ranks({.n = 2}, [&](Rank& r) {
      nn::Linear module = layer();
      auto unit = fully_shard(module, {.group = r.world});
      const Caught caught = catch_error([&] { use(unit, module); });
      EXPECT_TRUE(caught.is_one_of({ErrorKind::invalid_argument, ErrorKind::aborted})) << caught;
      EXPECT_TRUE(contains(caught.text, part)) << caught;
    });
  };
  // The module that was given, instead of the unit: it has half of its outputs.
  expect([](auto&, nn::Linear& module) { module(input()).sum().backward(); }, "outside of its unit's forward");
  expect([](auto& unit, auto&) { unit(input()).sum().backward({}, true, /*create_graph=*/true); }, "create_graph");
  expect(
      [](auto& unit, nn::Linear& module) {
        module->weight.set_data(module->weight.clone());
        unit(input());
      },
      "no longer lies where fully_shard put it");
}

struct LeaksImpl : nn::Module {
  Tensor forward(const Tensor& x) {
    if (returns_parameter) return inner->weight.t();
    kept = inner(x);
    return kept.detach();
  }
  nn::Linear inner = register_module("inner", layer());
  Tensor kept;
  bool returns_parameter = false;
};

TEST(FullyShardedFault, TensorsLeaveAUnitAsResults) {
  for (const bool returns_parameter : {true, false}) {
    run_ranks({.n = 2}, [&](Rank& r) {
      auto module = std::make_shared<LeaksImpl>();
      module->returns_parameter = returns_parameter;
      auto unit = fully_shard(module, {.group = r.world});
      const Caught caught = catch_error([&] { unit(input()); });
      EXPECT_TRUE(caught.is_one_of({ErrorKind::invalid_argument, ErrorKind::aborted})) << caught;
      EXPECT_TRUE(contains(caught.text, returns_parameter ? "returns one of its parameters" : "keeps some that need") ||
                  contains(caught.text, "forward of unit 0"))
          << caught;
    });
  }
}

}  // namespace
}  // namespace maniple::harness::fully_sharded_fault_test
