// Tensors that leave a unit's forward otherwise than as results: the module keeps them, and the program goes back from
// them. The unit's parameters are not whole then.
#include <gtest/gtest.h>

#include "fault/expect_error.h"
#include "train/sharded_models.h"

namespace maniple::harness::fully_sharded_kept_test {
namespace {

using namespace sharded_models;

/// Keeps a tensor: one on the way to the result, or one beside it.
struct KeepsImpl : nn::Module {
  explicit KeepsImpl(bool keeps_beside) : beside(keeps_beside) {}
  Tensor forward(const Tensor& x) {
    const Tensor hidden = torch::tanh(first(x));
    kept = (beside ? torch::tanh(side(hidden)) : hidden) * factor;
    return last(beside ? hidden : kept);
  }
  bool beside;
  nn::Linear first = register_module("first", nn::Linear(4, 4)), side = register_module("side", nn::Linear(4, 4)),
             last = register_module("last", nn::Linear(4, 3));
  Tensor factor = register_parameter("factor", torch::ones({4}));
  Tensor kept;
};
TORCH_MODULE(Keeps);

struct Choice {
  bool beside = false, frozen = false, reshards = true;
};

/// A unit that keeps a tensor, in a root that has a layer of its own.
struct RootImpl : nn::Module {
  RootImpl(const Choice& choice, const FullyShardOptions* options) {
    filled(first);
    const auto make = [&] {
      Keeps made = filled(Keeps(choice.beside));
      for (auto& parameter : made->parameters()) parameter.requires_grad_(!choice.frozen);
      return made;
    };
    if (options != nullptr) {
      unit = register_module("block", fully_shard(make, *options));
    } else {
      plain = register_module("block", make());
    }
  }
  Tensor forward(const Tensor& x) {
    const Tensor hidden = torch::tanh(first(x));
    return unit ? unit(hidden) : plain(hidden);
  }
  Tensor kept() const { return unit ? unit->module()->kept : plain->kept; }
  nn::Linear first = register_module("first", nn::Linear(4, 4));
  FullySharded<Keeps> unit{nullptr};
  Keeps plain{nullptr};
};
TORCH_MODULE(Root);

enum class From { kept, kept_and_result, result_then_kept, kept_to_input };

/// Runs forward and backward, and returns the gradient of the input.
Tensor gradients_from(From from, const Tensor& x, const Tensor& result, const Tensor& kept, int ranks) {
  const Tensor loss = loss_of(kept) / ranks, other = loss_of(result) / ranks;
  switch (from) {
    case From::kept: loss.backward(); break;
    case From::kept_and_result: (loss + other).backward(); break;
    case From::result_then_kept:
      other.backward({}, /*retain_graph=*/true);
      loss.backward();
      break;
    case From::kept_to_input: return torch::autograd::grad({loss}, {x})[0] * ranks;
  }
  return x.grad() * ranks;
}

void expect_gradients_of_one_process(const Choice& choice) {
  for_all([&](Rank& r, Overlap overlap) {
    const int n = r.world->size();
    const FullyShardOptions options{.group = r.world, .reshard_after_forward = choice.reshards, .overlap = overlap};
    Root reference(choice, nullptr);
    auto net = fully_shard([&] { return Root(choice, &options); }, options);
    for (const From from : {From::kept, From::kept_and_result, From::result_then_kept, From::kept_to_input}) {
      SCOPED_TRACE(static_cast<int>(from));
      Tensor expected;
      for (int rank = 0; rank < n; ++rank) {
        const Tensor x = batch(static_cast<int>(from), rank).requires_grad_(), result = reference(x);
        const Tensor gradient = gradients_from(from, x, result, reference->kept(), n);
        if (rank == r.rank) expected = gradient;
      }
      const Tensor x = batch(static_cast<int>(from), r.rank).requires_grad_(), result = net(x);
      expect_close(gradients_from(from, x, result, net->module()->kept(), 1), expected, "input");
      expect_same_gradients(*net, *reference, *r.world);
    }
    inside(inside(net).unit).kept = Tensor();
    EXPECT_FALSE(net->unit()->whole());
  });
}

TEST(FullyShardedKept, ATensorOnTheWayToTheResult) {
  for (const bool reshards : {true, false}) expect_gradients_of_one_process({.reshards = reshards});
}
TEST(FullyShardedKept, ATensorBesideTheResult) {
  for (const bool reshards : {true, false}) expect_gradients_of_one_process({.beside = true, .reshards = reshards});
}
TEST(FullyShardedKept, TensorsOfFrozenUnits) {
  for (const bool beside : {true, false}) expect_gradients_of_one_process({.beside = beside, .frozen = true});
}

TEST(FullyShardedKept, AGatherThatFailsIsTheErrorOfTheBackward) {
  for_all([](Rank& r, Overlap overlap) {
    auto unit = fully_shard([] { return filled(Keeps(true)); }, {.group = r.world, .overlap = overlap});
    const Tensor result = unit(batch(0, r.rank).requires_grad_());
    r.world->barrier();
    if (r.rank == 0) return r.world->abort("no more batches");
    const Caught caught = catch_error([&] {
      for (;;) unit->module()->kept.sum().backward({}, /*retain_graph=*/true);  // until rank 0's abort arrives
    });
    EXPECT_TRUE(caught.is(ErrorKind::aborted)) << caught;
    EXPECT_TRUE(contains(caught.text, "no more batches")) << caught;
    EXPECT_EQ(unit->module()->factor.size(0), rows_of(4, r.world->size(), r.rank).count);  // rows again, not whole
  });
}

TEST(FullyShardedKept, CreateGraphIsRefused) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto unit = fully_shard([] { return filled(Keeps(true)); }, {.group = r.world});
    unit(batch(0, r.rank));
    const Caught caught =
        catch_error([&] { unit->module()->kept.sum().backward({}, true, /*create_graph=*/true), r.world->barrier(); });
    EXPECT_TRUE(caught.is_one_of({ErrorKind::invalid_argument, ErrorKind::aborted})) << caught;
    EXPECT_TRUE(contains(caught.text, "create_graph")) << caught;
  });
}

}  // namespace
}  // namespace maniple::harness::fully_sharded_kept_test
