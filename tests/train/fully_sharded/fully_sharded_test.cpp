// Fully sharded modules: the same losses, gradients and parameters as data-parallel training, whatever a unit is made
// of.
#include <gtest/gtest.h>

#include <functional>

#include "harness/run_ranks.h"
#include "harness/shared_folder.h"
#include "train/fully_sharded/unit.h"
#include "train/models.h"
#include "train/sharded_models.h"
#include <maniple/maniple.h>

namespace maniple::harness::fully_sharded_test {
namespace {

namespace nn = torch::nn;
using maniple::testing_models::numbers;
using maniple::testing_models::training_device;
using sharded_models::batch;
using sharded_models::filled;
using sharded_models::loss_of;
using sharded_models::Wrap;
using torch::Tensor;

/// Sizes that no number of ranks divides. `spare` is used only when asked for.
struct BlockImpl : nn::Module {
  Tensor forward(const Tensor& x) {
    const Tensor y = x + down(torch::gelu(norm(up(x))));
    return use_spare ? y * spare : y;
  }
  bool use_spare = false;
  nn::Linear up = register_module("up", nn::Linear(5, 7)), down = register_module("down", nn::Linear(7, 5));
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({7})));
  Tensor spare = register_parameter("spare", torch::ones({5}));
};
TORCH_MODULE(Block);

Block block() { return filled(Block()); }

/// Blocks in a Sequential between layers of the root's own, one of which has fewer rows than there are ranks, and a
/// scalar.
struct NetImpl : nn::Module {
  explicit NetImpl(const Wrap& add, int depth = 3) {
    for (int i = 0; i < depth; ++i) add(blocks);
    filled(first), filled(last);
    first->to(training_device()), last->to(training_device());
    scale = register_parameter("scale", torch::full({}, 1.5, training_device()));
  }
  Tensor forward(const Tensor& x) { return last(blocks->forward(first(x))) * scale; }
  nn::Linear first = register_module("first", nn::Linear(4, 5)), last = register_module("last", nn::Linear(5, 3));
  nn::Sequential blocks = register_module("blocks", nn::Sequential());
  Tensor scale;
};
TORCH_MODULE(Net);

Net plain() {
  return Net([](nn::Sequential& to) { to->push_back(block()); });
}
FullySharded<Net> sharded(const FullyShardOptions& options) {
  return fully_shard([&] { return Net([&](nn::Sequential& to) { to->push_back(fully_shard(block, options)); }); },
                     options);
}

void expect_close(const Tensor& a, const Tensor& b, const std::string& what, double tolerance = 1e-6) {
  ASSERT_EQ(a.defined(), b.defined()) << what;
  if (!a.defined()) return;
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  EXPECT_TRUE(torch::allclose(a.to(torch::kFloat64), b.to(torch::kFloat64), tolerance, tolerance)) << what << "\n"
                                                                                                   << a << "\n"
                                                                                                   << b;
}

void expect_same(nn::Module& ours, nn::Module& reference, double tolerance = 1e-6) {
  const auto named = reference.named_parameters();
  const NamedTensors all = full_parameters(ours);
  ASSERT_EQ(all.size(), named.size());
  for (const auto& [name, whole] : all) expect_close(whole, named[name].detach(), name, tolerance);
}

/// This rank's rows of the gradients equal the reference's.
void expect_same_gradients(const nn::Module& ours, const nn::Module& reference, const ProcessGroup& group,
                           double tolerance = 1e-6) {
  const auto named = reference.named_parameters();
  for (const auto& item : ours.named_parameters()) {
    const Tensor whole = named[item.key()].grad();
    ASSERT_EQ(item.value().grad().defined(), whole.defined()) << item.key();
    if (!whole.defined()) continue;
    const Tensor rows = whole.dim() == 0 ? whole.reshape({1}) : whole;
    const auto own = rows_of(rows.size(0), group.size(), group.rank());
    expect_close(item.value().grad(), rows.narrow(0, own.begin, own.count), item.key(), tolerance);
  }
}

TEST(FullySharded, TrainsAsDistributedDataParallelDoes) {
  for (const int n : {1, 2, 3, 4}) {
    for (const Overlap overlap : {Overlap::none, Overlap::thread}) {
      for (const std::optional<bool> reshard : {std::optional<bool>(), std::optional<bool>(n % 2 == 0)}) {
        run_ranks({.n = n}, [&](Rank& r) {
          Net reference = plain();
          DistributedDataParallel ddp(reference, {.find_unused_parameters = true, .group = r.world});
          torch::optim::AdamW theirs(reference->parameters(), torch::optim::AdamWOptions(0.01));
          auto net = sharded({.group = r.world, .reshard_after_forward = reshard, .overlap = overlap});
          torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
          for (int step = 0; step < 3; ++step) {
            theirs.zero_grad(), optimizer.zero_grad();
            const Tensor expected = loss_of(ddp.forward(batch(step, r.rank))), loss = loss_of(net(batch(step, r.rank)));
            expect_close(loss.detach(), expected.detach(), "loss");
            for (const auto& item : net->named_parameters()) EXPECT_TRUE(item.value().is_leaf()) << item.key();
            expected.backward(), loss.backward();
            expect_same_gradients(*net, *reference, *r.world);
            const auto norm = clip_grad_norm_(*net, 0.1), other = clip_grad_norm_(reference->parameters(), 0.1);
            expect_close(norm.cpu(), other.cpu(), "norm", 1e-5);
            theirs.step(), optimizer.step();
          }
          expect_same(*net, *reference, 1e-5);
        });
      }
    }
  }
}

TEST(FullySharded, ParametersHaveTheNamesOfThePlainModuleAndAreRows) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto net = sharded({.group = r.world});
    Net reference = plain();
    const auto names = reference->named_parameters().keys();
    EXPECT_EQ(net->named_parameters().keys(), names);
    for (const auto& item : net->named_parameters()) {
      const auto shape = reference->named_parameters()[item.key()].sizes();
      EXPECT_EQ(item.value().size(0), rows_of(shape.empty() ? 1 : shape[0], 2, r.rank).count) << item.key();
    }
    net->eval();
    EXPECT_FALSE(net->module()->is_training());
    EXPECT_FALSE(net->module()->blocks->is_training());
  });
}

TEST(FullySharded, AUnitIsWholeOnlyWhileItComputes) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto net = sharded({.group = r.world});
    const auto& inner = net->module()->blocks->ptr<FullyShardedImpl<BlockImpl>>(0);
    const Tensor loss = loss_of(net(batch(0, r.rank)));
    EXPECT_FALSE(inner->unit()->whole());
    EXPECT_TRUE(net->unit()->whole());  // the root stays until its backward, which comes next
    loss.backward();
    EXPECT_FALSE(inner->unit()->whole());
    EXPECT_FALSE(net->unit()->whole());
    {
      const auto guard = net->unshard();
      EXPECT_EQ(inner->module()->up->weight.sizes(), torch::IntArrayRef({7, 5}));
    }
    EXPECT_FALSE(inner->unit()->whole());
    {
      const Tensor dropped = net(batch(0, r.rank));
    }  // a graph without a backward
    EXPECT_FALSE(net->unit()->whole());
    const torch::NoGradGuard no_grad;
    Net reference = plain();
    expect_close(net(batch(1, r.rank)), reference(batch(1, r.rank)), "without grad mode");
    EXPECT_FALSE(net->unit()->whole());
  });
}

TEST(FullySharded, AccumulatesWithAndWithoutSynchronisation) {
  for (const bool synchronised : {false, true}) {
    run_ranks({.n = 3}, [&](Rank& r) {
      Net reference = plain();
      DistributedDataParallel ddp(reference, {.find_unused_parameters = true, .group = r.world});
      auto net = sharded({.group = r.world});
      for (int step = 0; step < 3; ++step) {
        std::optional<NoSync> theirs;
        std::optional<UnitsNoSync> ours;
        if (step < 2) theirs.emplace(ddp.reducer());
        if (step < 2 && !synchronised) ours.emplace(net->no_sync());
        loss_of(ddp.forward(batch(step, r.rank))).backward();
        loss_of(net(batch(step, r.rank))).backward();
        if (step < 2 && !synchronised) {
          // This rank's rows of its own gradients so far.
          const Tensor own = net->module()->last->bias.grad(), whole = reference->last->bias.grad();
          expect_close(own, whole.narrow(0, r.rank, 1), "inside no_sync");
        }
      }
      expect_same_gradients(*net, *reference, *r.world);
    });
  }
}

TEST(FullySharded, SeveralForwardsAndARetainedGraph) {
  for (const Overlap overlap : {Overlap::none, Overlap::thread}) {
    run_ranks({.n = 2}, [&](Rank& r) {
      Net reference = plain();
      DistributedDataParallel ddp(reference, {.find_unused_parameters = true, .group = r.world});
      auto net = sharded({.group = r.world, .overlap = overlap});
      for (int step = 0; step < 2; ++step) {
        const Tensor theirs = loss_of(ddp.forward(batch(0, r.rank)) + ddp.forward(batch(1, r.rank)));
        theirs.backward({}, /*retain_graph=*/true);
        theirs.backward();
        const Tensor loss = loss_of(net(batch(0, r.rank)) + net(batch(1, r.rank)));
        loss.backward({}, /*retain_graph=*/true);
        loss.backward();
        expect_same_gradients(*net, *reference, *r.world, 1e-5);
        const Tensor ours = torch::autograd::grad({loss_of(net(batch(3, r.rank)))}, {net->module()->last->bias}, {},
                                                  false, false, /*allow_unused=*/true)[0];
        EXPECT_FALSE(ours.defined());  // gradients go to grad alone, and nothing is left whole
        EXPECT_FALSE(net->unit()->whole());
      }
    });
  }
}

TEST(FullySharded, UnusedParametersAndFrozenOnes) {
  run_ranks({.n = 3}, [](Rank& r) {
    Block reference = block(), own = block();
    for (Block* one : {&reference, &own})
      (*one)->up->weight.requires_grad_(false), (*one)->down->bias.requires_grad_(false);
    DistributedDataParallel ddp(reference, {.find_unused_parameters = true, .group = r.world});
    auto unit = fully_shard(own, {.group = r.world});
    const auto x = [&] { return numbers({6, 5}, r.rank).to(training_device()).requires_grad_(); };
    for (int step = 0; step < 3; ++step) {
      reference->use_spare = own->use_spare = step == 1 && r.rank == 2;  // by one rank, in one step
      const Tensor one = x(), other = x();
      loss_of(ddp.forward(one * 1)).backward();
      loss_of(unit(other * 1)).backward();
      expect_same_gradients(*unit, *reference, *r.world);
      expect_close(other.grad(), one.grad(), "of the argument");
      EXPECT_EQ(unit->module()->spare.grad().defined(), step > 0);
      EXPECT_FALSE(unit->unit()->whole());
    }
    // All frozen: gradients of arguments alone.
    for (auto& parameter : unit->parameters()) parameter.requires_grad_(false);
    for (auto& parameter : reference->parameters()) parameter.requires_grad_(false);
    const Tensor one = x(), other = x();
    loss_of(reference(one)).backward();
    loss_of(unit(other)).backward();
    expect_close(other.grad(), one.grad(), "of the argument, all frozen");
    EXPECT_FALSE(unit->unit()->whole());
  });
}

struct PairImpl : nn::Module {
  std::tuple<Tensor, std::vector<Tensor>> forward(const std::tuple<Tensor, Tensor>& in, int times = 3) {
    const Tensor y = a(std::get<0>(in)) * times;
    return {y, {b(y), std::get<1>(in)}};
  }
  nn::Linear a = register_module("a", nn::Linear(4, 5)), b = register_module("b", nn::Linear(5, 2));
};
TORCH_MODULE(Pair);

TEST(FullySharded, AnyArgumentsAndResults) {
  run_ranks({.n = 2}, [](Rank& r) {
    Pair reference = filled(Pair());
    DistributedDataParallel ddp(reference, {.group = r.world});
    auto unit = fully_shard(filled(Pair()), {.group = r.world});
    const auto in = std::make_tuple(batch(0, r.rank), batch(1, r.rank));
    const auto use = [](const std::tuple<Tensor, std::vector<Tensor>>& out) {
      return std::get<0>(out).sum() + std::get<1>(out)[0].pow(2).sum() + std::get<1>(out)[1].sum();
    };
    use(ddp.forward(in, 3)).backward();
    use(unit(in)).backward();
    expect_same_gradients(*unit, *reference, *r.world);

    nn::ModuleList list;
    list->push_back(fully_shard(filled(nn::Linear(4, 3)), {.group = r.world}));
    list->push_back(fully_shard(nn::Sequential(filled(nn::Linear(3, 3)), nn::Tanh()), {.group = r.world}));
    Tensor y = list->ptr<FullyShardedImpl<nn::LinearImpl>>(0)->forward(batch(0, r.rank));
    y = list->ptr<FullyShardedImpl<nn::SequentialImpl>>(1)->forward(y);
    y.sum().backward();
    EXPECT_EQ(list->named_parameters().keys(),
              (std::vector<std::string>{"0.weight", "0.bias", "1.0.weight", "1.0.bias"}));
    for (const auto& item : list->named_parameters()) EXPECT_TRUE(item.value().grad().defined()) << item.key();
  });
}

TEST(FullySharded, ActivationCheckpointingOfUnitsAndInsideThem) {
  struct InsideImpl : nn::Module {
    Tensor forward(const Tensor& x) { return checkpoint(inner, x); }
    Block inner = register_module("inner", block());
  };
  for (const Overlap overlap : {Overlap::none, Overlap::thread}) {
    run_ranks({.n = 2}, [&](Rank& r) {
      Block reference = block();
      DistributedDataParallel ddp(reference, {.find_unused_parameters = true, .group = r.world});
      auto unit = fully_shard(block, {.group = r.world, .overlap = overlap});
      auto inside = fully_shard(std::make_shared<InsideImpl>(), {.group = r.world, .overlap = overlap});
      for (int step = 0; step < 2; ++step) {
        reference->zero_grad(), unit->zero_grad(), inside->zero_grad();
        const Tensor x = numbers({6, 5}, r.rank).to(training_device()).requires_grad_();
        loss_of(ddp.forward(x)).backward();
        loss_of(checkpoint(unit, x)).backward();
        loss_of(inside(x)).backward();
        expect_same_gradients(*unit, *reference, *r.world);
        expect_same_gradients(*inside->module()->inner, *reference, *r.world);
        EXPECT_FALSE(unit->unit()->whole());
      }
    });
  }
}

/// oneDNN of LibTorch 1.13 has no bfloat16 on some processors.
struct WithoutOneDnn {
  WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(false); }
  ~WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(before); }
  bool before = at::globalContext().userEnabledMkldnn();
};

TEST(FullySharded, MixedPrecisionComputesInItAndStepsInFloat32) {
  const WithoutOneDnn guard;
  run_ranks({.n = 2}, [](Rank& r) {
    Net reference = plain();
    DistributedDataParallel ddp(reference, {.find_unused_parameters = true, .group = r.world});
    for (const auto reduce : {std::optional<torch::ScalarType>(), std::optional<torch::ScalarType>(torch::kFloat32)}) {
      auto net =
          sharded({.group = r.world, .mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = reduce}});
      const Tensor y = net(batch(0, r.rank));
      EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
      loss_of(y.to(torch::kFloat32)).backward();
      reference->zero_grad();
      loss_of(ddp.forward(batch(0, r.rank))).backward();
      for (const auto& parameter : net->parameters()) EXPECT_EQ(parameter.scalar_type(), torch::kFloat32);
      expect_same_gradients(*net, *reference, *r.world, 0.1);
      for (const auto& [name, whole] : full_parameters(*net))
        EXPECT_TRUE(whole.equal(reference->named_parameters()[name].detach())) << name;  // not rounded
      const Tensor z = fully_shard(
          block,
          {.group = r.world, .mixed_precision = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat64}})(
          numbers({2, 5}, 1).to(training_device(), torch::kFloat32));
      EXPECT_EQ(z.scalar_type(), torch::kFloat64);
    }
  });
}

TEST(FullySharded, DividesWithinAGroupAndReplicatesOverAnother) {
  for (const Overlap overlap : {Overlap::none, Overlap::thread}) {
    run_ranks({.n = 4}, [&](Rank& r) {
      const DeviceMesh mesh(r.world, {{"replica", 2}, {"shard", 2}});
      Net reference = plain();
      DistributedDataParallel ddp(reference, {.find_unused_parameters = true, .group = r.world});
      auto net = sharded({.group = mesh["shard"], .replicate_group = mesh["replica"], .overlap = overlap});
      for (int step = 0; step < 2; ++step) {
        loss_of(ddp.forward(batch(step, r.rank))).backward();
        loss_of(net(batch(step, r.rank))).backward();
      }
      expect_same_gradients(*net, *reference, *mesh["shard"]);
      expect_close(clip_grad_norm_(*net, 0.1).cpu(), clip_grad_norm_(reference->parameters(), 0.1).cpu(), "norm", 1e-5);
    });
  }
}

// Ranks of another run may be other processes: tensors for them go through a file.
void keep(const NamedTensors& tensors, const std::string& name) {
  std::vector<Tensor> values;
  for (const auto& [key, value] : tensors) values.push_back(value.cpu());
  torch::save(values, SharedFolder::here() + "/" + name);
}
void expect_kept(const NamedTensors& tensors, const std::string& name, double tolerance) {
  std::vector<Tensor> values;
  torch::load(values, SharedFolder::here() + "/" + name);
  ASSERT_EQ(values.size(), tensors.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    expect_close(tensors[i].second.cpu(), values[i], tensors[i].first, tolerance);
}

TEST(FullySharded, CheckpointsLoadOnOtherNumbersOfRanksAndInPlainModules) {
  const SharedFolder shared;
  const auto train = [](auto& net, torch::optim::Optimizer& optimizer, int step) {
    optimizer.zero_grad();
    loss_of(net->forward(batch(step, 0))).backward();  // the same batch on all ranks
    optimizer.step();
  };
  run_ranks({.n = 3, .env = shared.env()}, [&](Rank& r) {
    auto net = sharded({.group = r.world});
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
    train(net, optimizer, 0);
    Checkpoint checkpoint({.folder = SharedFolder::here(), .background = false, .sharded = true, .group = r.world});
    checkpoint.add("model", *net).add("optimizer", optimizer).save(1);
    EXPECT_EQ(checkpoint.last_error(), "");
    const NamedTensors now = full_parameters(*net, 0);
    EXPECT_EQ(now.empty(), r.rank != 0);
    train(net, optimizer, 1);
    const NamedTensors next = full_parameters(*net);
    if (r.rank == 0) keep(now, "then.pt"), keep(next, "later.pt");
  });
  for (const int n : {1, 2, 4}) {
    run_ranks({.n = n, .env = shared.env()}, [&](Rank& r) {
      auto net = sharded({.group = r.world});
      torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.5));
      Checkpoint checkpoint({.folder = SharedFolder::here(), .sharded = true, .group = r.world});
      checkpoint.add("model", *net).add("optimizer", optimizer);
      EXPECT_EQ(checkpoint.load(), std::optional<std::int64_t>(1));
      const NamedTensors then = full_parameters(*net);
      expect_kept(then, "then.pt", 0);
      train(net, optimizer, 1);
      expect_kept(full_parameters(*net), "later.pt", 1e-5);

      Net whole = plain();
      torch::optim::AdamW theirs(whole->parameters(), torch::optim::AdamWOptions(0.5));
      Checkpoint again({.folder = SharedFolder::here(), .sharded = true, .group = r.world});
      again.add("model", *whole).add("optimizer", theirs);
      EXPECT_EQ(again.load(), std::optional<std::int64_t>(1));
      train(whole, theirs, 1);
      expect_same(*net, *whole, 1e-5);
      set_full_parameters(*net, then);
      expect_kept(full_parameters(*net), "then.pt", 0);
    });
  }
}

}  // namespace
}  // namespace maniple::harness::fully_sharded_test
