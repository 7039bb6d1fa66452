// Gradients that fully sharded modules add up inside no_sync(): zero_grad(), other models, units that some ranks use.
#include <gtest/gtest.h>

#include "fault/expect_error.h"
#include "train/sharded_models.h"

namespace maniple::harness::fully_sharded_accumulation_test {
namespace {

using namespace sharded_models;

enum class Zero { torch_optimizer, to_none, module, our_optimizer };

TEST(FullyShardedUse, ZeroGradDiscardsWhatNoSyncAddedUp) {
  for (const Zero zero : {Zero::torch_optimizer, Zero::to_none, Zero::module, Zero::our_optimizer}) {
    for_all([&](Rank& r, Overlap overlap) {
      const int n = r.world->size();
      Net reference = plain();
      auto net = sharded({.group = r.world, .overlap = overlap});
      torch::optim::SGD theirs(reference->parameters(), 0.1), optimizer(net->parameters(), 0.1);
      optim::SGD ours(net->parameters(), torch::optim::SGDOptions(0.1));
      const auto clear = [&] {
        theirs.zero_grad();
        if (zero == Zero::torch_optimizer) optimizer.zero_grad();
        if (zero == Zero::our_optimizer) ours.zero_grad();
        if (zero == Zero::module) net->zero_grad();
        if (zero != Zero::to_none) return;
        for (auto& parameter : net->parameters()) parameter.mutable_grad() = Tensor();
      };
      const auto backward = [&](int step, bool synchronised, std::size_t left_out = 3) {
        reference->left_out = inside(net).left_out = left_out;
        loss_of_all([&](int rank) { return loss_of(reference(batch(step, rank))); }, n).backward();
        std::optional<UnitsNoSync> guard;
        if (!synchronised) guard.emplace(net->no_sync());
        loss_of(net(batch(step, r.rank))).backward();
      };
      for (int round = 0; round < 3; ++round) {
        if (round == 2) backward(20, true);  // gradients of their own before what is discarded
        backward(0, false), backward(1, false);
        clear();
        backward(2, false), backward(3, true);
        expect_same_gradients(*net, *reference, *r.world);
        backward(4, false);
        clear();
        backward(5, true, /*left_out=*/1);
        expect_same_gradients(*net, *reference, *r.world);
        if (round == 1) clear();
        backward(6, false), backward(7, false), backward(8, true, /*left_out=*/0);
        expect_same_gradients(*net, *reference, *r.world);
        clear();
      }
    });
  }
}

TEST(FullyShardedUse, GradientsThatChangeBetweenBackwardsWithoutSynchronisationAreAnError) {
  for_all([](Rank& r, Overlap overlap) {
    auto net = sharded({.group = r.world, .overlap = overlap});
    {
      const auto guard = net->no_sync();
      loss_of(net(batch(0, r.rank))).backward();
    }
    for (auto& parameter : net->parameters()) {
      if (parameter.grad().defined()) parameter.mutable_grad().mul_(0.5);
    }
    const Caught caught = catch_error([&] { loss_of(net(batch(1, r.rank))).backward(), r.world->barrier(); });
    EXPECT_TRUE(caught.is_one_of({ErrorKind::invalid_argument, ErrorKind::aborted})) << caught;
    if (r.rank == 0) {
      EXPECT_TRUE(contains(caught.text, "no_sync")) << caught;
    }
  });
}

TEST(FullyShardedUse, ABackwardOfAnotherModelLeavesAccumulatedGradientsAlone) {
  for_all([](Rank& r, Overlap overlap) {
    const int n = r.world->size();
    Net reference = plain();
    auto net = sharded({.group = r.world, .overlap = overlap}), other = sharded({.group = r.world, .overlap = overlap});
    {
      const auto guard = net->no_sync();
      loss_of(net(batch(0, r.rank))).backward();
    }
    loss_of(other(batch(1, r.rank))).backward();
    EXPECT_TRUE(net->unit()->has_accumulated());
    if (r.rank == 0) other->zero_grad();  // of no concern to the first
    loss_of(net(batch(2, r.rank))).backward();
    for (const int step : {0, 2})
      loss_of_all([&](int rank) { return loss_of(reference(batch(step, rank))); }, n).backward();
    expect_same_gradients(*net, *reference, *r.world);
    EXPECT_FALSE(net->unit()->has_accumulated());
  });
}

TEST(FullyShardedUse, UnitsThatSomeRanksUseWithoutSynchronisationAreAveraged) {
  for (const bool hybrid : {false, true}) {
    for (const Overlap overlap : {Overlap::none, Overlap::thread}) {
      for (const int n : {2, 3, 4}) {
        if (hybrid && n != 4) continue;
        run_ranks({.n = n}, [&](Rank& r) {
          FullyShardOptions options{.group = r.world, .overlap = overlap};
          std::optional<DeviceMesh> mesh;
          if (hybrid) {
            mesh.emplace(r.world, std::vector<MeshDimension>{{"replica", 2}, {"shard", 2}});
            options.group = (*mesh)["shard"], options.replicate_group = (*mesh)["replica"];
          }
          Net reference = plain();
          auto net = sharded(options);
          // Inside no_sync rank 1 uses all parameters of the middle unit, rank 2 some, the others none. The backward
          // outside does not reach the unit.
          const auto uses = [](int rank) { return rank == 1 ? Uses::both : rank == 2 ? Uses::first : Uses::none; };
          Unit& unit = *inside(net).blocks->ptr<Unit>(1);
          for (int round = 0; round < 2; ++round) {
            for (int rank = 0; rank < n; ++rank) {
              reference->blocks->ptr<LayerImpl>(1)->uses = uses(rank);
              reference->left_out = 3;
              (loss_of(reference(batch(0, rank))) / n).backward();
              reference->left_out = 1;
              (loss_of(reference(batch(1, rank))) / n).backward();
            }
            const_cast<LayerImpl&>(*unit.module()).uses = uses(r.rank);
            inside(net).left_out = 3;
            {
              const auto guard = net->no_sync();
              loss_of(net(batch(0, r.rank))).backward();
              EXPECT_EQ(unit.unit()->has_accumulated(), uses(r.rank) != Uses::none);
            }
            inside(net).left_out = 1;
            loss_of(net(batch(1, r.rank))).backward();
            EXPECT_FALSE(unit.unit()->has_accumulated());
            expect_same_gradients(*net, *reference, *options.group);
          }
        });
      }
    }
  }
}

}  // namespace
}  // namespace maniple::harness::fully_sharded_accumulation_test
