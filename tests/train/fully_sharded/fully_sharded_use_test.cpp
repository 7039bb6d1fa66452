// How programs use fully sharded modules: results that live on, parameters that are written, frozen or replaced.
#include <gtest/gtest.h>

#include "fault/expect_error.h"
#include "train/sharded_models.h"

namespace maniple::harness::fully_sharded_use_test {
namespace {

using namespace sharded_models;

// ---- Results that live on -----------------------------------------------------------------------------------------

enum class Keeps { all, rank_0, last_rank };

TEST(FullyShardedUse, ResultsThatSomeRanksKeepChangeNothing) {
  for (const Keeps keeps : {Keeps::all, Keeps::rank_0, Keeps::last_rank}) {
    for_all([&](Rank& r, Overlap overlap) {
      const int n = r.world->size();
      const bool here = keeps == Keeps::all || r.rank == (keeps == Keeps::rank_0 ? 0 : n - 1);
      Net reference = plain();
      torch::optim::SGD theirs(reference->parameters(), 0.5);
      auto net = sharded({.group = r.world, .overlap = overlap});
      torch::optim::SGD optimizer(net->parameters(), 0.5);
      std::vector<Tensor> kept;  // with their graphs, as a program keeps a first loss to print it at the end
      const auto keep = [&](const Tensor& loss) {
        if (here) kept.push_back(loss);
      };
      keep(loss_of(net(batch(9, r.rank))));
      for (int step = 0; step < 3; ++step) {
        theirs.zero_grad(), optimizer.zero_grad();
        loss_of_all([&](int rank) { return loss_of(reference(batch(step, rank))); }, n).backward();
        const Tensor loss = loss_of(net(batch(step, r.rank)));
        expect_close(loss.detach(), loss_of(reference(batch(step, r.rank))).detach(), "loss");
        loss.backward();
        expect_same_gradients(*net, *reference, *r.world);
        keep(loss);
        theirs.step(), optimizer.step();
        {
          const torch::NoGradGuard no_grad;
          expect_close(loss_of(net(batch(7, r.rank))), loss_of(reference(batch(7, r.rank))), "evaluated");
        }
        keep(loss_of(net(batch(8, r.rank))));
      }
      expect_same(*net, *reference);
      kept.clear();
      EXPECT_FALSE(net->unit()->whole());
    });
  }
}

TEST(FullyShardedUse, ForwardsAndEvaluationsBeforeABackward) {
  for_all([](Rank& r, Overlap overlap) {
    const int n = r.world->size();
    Net reference = plain();
    torch::optim::SGD theirs(reference->parameters(), 0.5);
    auto net = sharded({.group = r.world, .overlap = overlap});
    torch::optim::SGD optimizer(net->parameters(), 0.5);
    const auto step = [&](auto& model, auto& sgd, int rank, int of) {
      sgd.zero_grad();
      const auto both = [&](int from) {
        const Tensor one = model(batch(0, from)), other = model(batch(1, from));
        {
          const torch::NoGradGuard no_grad;
          model(batch(2, from));
        }
        return std::make_pair(loss_of(one * other), loss_of(other));
      };
      std::vector<std::pair<Tensor, Tensor>> losses;
      for (int from = rank; from < rank + of; ++from) losses.push_back(both(from));
      for (const auto& [first, second] : losses) {
        (second / of).backward({}, /*retain_graph=*/true);
        model(batch(3, rank));  // an unused graph between two backwards
        (first / of).backward();
      }
      sgd.step();
    };
    for (int i = 0; i < 2; ++i) {
      step(reference, theirs, 0, n);
      step(net, optimizer, r.rank, 1);
      expect_same(*net, *reference);
      EXPECT_FALSE(net->unit()->whole());
    }
  });
}

// torch::optim writes to data(), which autograd does not notice in one process either: the new values are used.
TEST(FullyShardedUse, BackwardOfAnOlderGraphEqualsOneProcess) {
  for (const bool again : {false, true}) {
    for_all([&](Rank& r, Overlap overlap) {
      const int n = r.world->size();
      Net reference = plain();
      torch::optim::SGD theirs(reference->parameters(), 0.5);
      auto net = sharded({.group = r.world, .overlap = overlap});
      torch::optim::SGD optimizer(net->parameters(), 0.5);
      const auto run = [&](auto& sgd, const std::function<Tensor(int)>& loss) {
        const Tensor old = loss(0);
        loss(1).backward();
        sgd.step();
        sgd.zero_grad();
        if (again) loss(2);
        old.backward();
      };
      run(theirs,
          [&](int step) { return loss_of_all([&](int rank) { return loss_of(reference(batch(step, rank))); }, n); });
      run(optimizer, [&](int step) { return loss_of(net(batch(step, r.rank))); });
      expect_same_gradients(*net, *reference, *r.world);
    });
  }
}

TEST(FullyShardedUse, ABackwardOfAnOlderGraphIsAnErrorWhereAutogradNotices) {
  for_all([](Rank& r, Overlap overlap) {
    auto net = sharded({.group = r.world, .overlap = overlap});
    optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
    const Tensor old = loss_of(net(batch(0, r.rank)));
    loss_of(net(batch(1, r.rank))).backward();
    optimizer.step();
    std::string text;  // LibTorch's own exception, or Maniple's if another rank was first
    try {
      old.backward();
      r.world->barrier();
    } catch (const std::exception& error) {
      text = error.what();
    }
    EXPECT_TRUE(contains(text, "modified by an inplace operation") || contains(text, "backward of a fully")) << text;
  });
}

TEST(FullyShardedUse, CheckpointedUnitsWithResultsThatOneRankKeeps) {
  for_all([](Rank& r, Overlap overlap) {
    const int n = r.world->size();
    Layer reference = layer();
    torch::optim::SGD theirs(reference->parameters(), 0.5);
    auto unit = fully_shard(layer, {.group = r.world, .reshard_after_forward = false, .overlap = overlap});
    torch::optim::SGD optimizer(unit->parameters(), 0.5);
    std::vector<Tensor> kept;
    for (int step = 0; step < 3; ++step) {
      theirs.zero_grad(), optimizer.zero_grad();
      loss_of_all([&](int rank) { return loss_of(reference(batch(step, rank))); }, n).backward();
      const Tensor loss = loss_of(checkpoint(unit, batch(step, r.rank).requires_grad_()));
      loss.backward();
      if (r.rank == 0) kept.push_back(loss), kept.push_back(unit(batch(4, 0)));
      if (r.rank != 0) unit(batch(4, 0));
      expect_same_gradients(*unit, *reference, *r.world);
      theirs.step(), optimizer.step();
    }
  });
}

// ---- Parameters that are written, frozen or replaced --------------------------------------------------------------

TEST(FullyShardedUse, WritesThatAutogradDoesNotSeeReachTheNextForward) {
  for_all([](Rank& r, Overlap overlap) {
    const torch::NoGradGuard no_grad;
    Net reference = plain();
    auto net = sharded({.group = r.world, .overlap = overlap});
    std::vector<FullySharded<Layer>> bare;  // units without a root
    std::vector<Layer> linears;
    for (int i = 0; i < 2; ++i)
      bare.push_back(fully_shard(layer, {.group = r.world, .overlap = overlap})), linears.push_back(layer());
    for (int step = 0; step < 3; ++step) {
      expect_close(net(batch(step, r.rank)), reference(batch(step, r.rank)), "root");
      expect_close(bare[1](bare[0](batch(step, r.rank))), linears[1](linears[0](batch(step, r.rank))), "units");
      for (auto& parameter : net->parameters()) parameter.data().mul_(0.5);
      for (auto& parameter : reference->parameters()) parameter.mul_(0.5);
      for (std::size_t i = 0; i < 2; ++i) {
        for (auto& parameter : bare[i]->parameters()) parameter.data().mul_(0.5);
        for (auto& parameter : linears[i]->parameters()) parameter.mul_(0.5);
      }
    }
  });
}

TEST(FullyShardedUse, OurOptimizersWithRanksThatHoldNoRows) {
  for_all([](Rank& r, Overlap overlap) {
    const int n = r.world->size();
    Net reference = plain();
    auto net = sharded({.group = r.world, .overlap = overlap});
    optim::AdamW theirs(reference->parameters(), torch::optim::AdamWOptions(0.05));
    optim::AdamW ours(net->parameters(), torch::optim::AdamWOptions(0.05));
    for (int step = 0; step < 3; ++step) {
      theirs.zero_grad(), ours.zero_grad();
      loss_of_all([&](int rank) { return loss_of(reference(batch(step, rank))); }, n).backward();
      loss_of(net(batch(step, r.rank))).backward();
      theirs.step(), ours.step();
      const torch::NoGradGuard no_grad;
      expect_close(net(batch(5, r.rank)), reference(batch(5, r.rank)), "evaluated");
      net(batch(6, r.rank));
    }
    expect_same(*net, *reference);
  });
}

TEST(FullyShardedUse, FreezingAfterwardsWorksWhereAllRanksDoIt) {
  for_all([](Rank& r, Overlap overlap) {
    const int n = r.world->size();
    Net reference = plain();
    auto net = sharded({.group = r.world, .overlap = overlap});
    const auto freeze = [&](const std::string& prefix, bool frozen) {
      for (nn::Module* module : {static_cast<nn::Module*>(reference.get()), static_cast<nn::Module*>(net.get())}) {
        for (auto& item : module->named_parameters()) {
          if (item.key().rfind(prefix, 0) == 0) item.value().requires_grad_(!frozen);
        }
      }
    };
    const auto step = [&](int i) {
      loss_of_all([&](int rank) { return loss_of(reference(batch(i, rank))); }, n).backward();
      loss_of(net(batch(i, r.rank))).backward();
      expect_same_gradients(*net, *reference, *r.world);
    };
    step(0);
    freeze("blocks", true), freeze("first.bias", true);
    step(1);
    freeze("blocks.1", false);
    step(2);
    freeze("", false);
    step(3);
  });
}

TEST(FullyShardedUse, FreezingOnOneRankIsNamed) {
  for_all([](Rank& r, Overlap overlap) {
    auto net = sharded({.group = r.world, .overlap = overlap});
    loss_of(net(batch(0, r.rank))).backward();
    if (r.rank == 0) inside(net).last->bias.requires_grad_(false);
    const Caught caught = catch_error([&] { loss_of(net(batch(1, r.rank))).backward(), r.world->barrier(); });
    EXPECT_TRUE(caught.is_one_of({ErrorKind::invalid_argument, ErrorKind::aborted})) << caught;
    EXPECT_TRUE(contains(caught.text, "requires_grad")) << caught;
  });
}

TEST(FullyShardedUse, AParameterFrozenWhileGradientsWaitIsNamed) {
  for_all([](Rank& r, Overlap overlap) {
    auto net = sharded({.group = r.world, .overlap = overlap});
    {
      const auto guard = net->no_sync();
      loss_of(net(batch(0, r.rank))).backward();
    }
    inside(net).last->bias.requires_grad_(false);
    const Caught caught = catch_error([&] { loss_of(net(batch(1, r.rank))).backward(), r.world->barrier(); });
    EXPECT_TRUE(caught.is_one_of({ErrorKind::invalid_argument, ErrorKind::aborted})) << caught;
    EXPECT_TRUE(contains(caught.text, "requires_grad of parameter last.bias")) << caught;
  });
}

TEST(FullyShardedUse, ReplacedDataAreNamed) {
  for (const bool converted : {false, true}) {
    run_ranks({.n = 2}, [&](Rank& r) {
      auto unit = fully_shard(layer, {.group = r.world});
      Tensor& weight = inside(unit).first->weight;
      weight.set_data(converted ? weight.to(torch::kFloat64) : weight.clone());
      const Caught caught = catch_error([&] { unit(batch(0, r.rank)); });
      EXPECT_TRUE(contains(caught.text, converted ? "is Double now and was Float" : "data pointer moved")) << caught;
    });
  }
}

TEST(FullyShardedUse, WritesToUnshardedParametersAreNotLostSilently) {
  for_all([](Rank& r, Overlap overlap) {
    auto net = sharded({.group = r.world, .overlap = overlap});
    torch::optim::SGD optimizer(net->parameters(), 0.5);
    const Tensor graph = loss_of(net(batch(0, r.rank)));
    {
      const auto guard = net->unshard();
      expect_close(net(batch(1, r.rank)).detach(), plain()(batch(1, r.rank)).detach(), "whole");
    }
    graph.backward();
    {
      const torch::NoGradGuard no_grad;
      const auto guard = net->unshard();
      inside(net).last->bias.fill_(1);
    }
    const Caught caught = catch_error([&] { net(batch(0, r.rank)); });
    EXPECT_TRUE(caught.is_one_of({ErrorKind::invalid_argument, ErrorKind::aborted})) << caught;
    EXPECT_TRUE(contains(caught.text, "parameter last.bias was written while it was whole")) << caught;
  });
}

TEST(FullyShardedUse, InlineOverlapIsRefused) {
  run_ranks({.n = 2}, [](Rank& r) {
    const Caught caught = catch_error([&] { fully_shard(layer, {.group = r.world, .overlap = Overlap::inline_}); });
    EXPECT_TRUE(caught.is(ErrorKind::invalid_argument) && contains(caught.text, "Overlap::inline_")) << caught;
    fully_shard(layer, {.group = r.world})(batch(0, r.rank)).sum().backward();
  });
}

}  // namespace
}  // namespace maniple::harness::fully_sharded_use_test
