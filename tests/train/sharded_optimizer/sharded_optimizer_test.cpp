// ShardedOptimizer against the plain optimizer: the same bits, whatever is divided over whom; its state; what it
// refuses.
#include <csignal>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/optim/stepped_parameters.h"
#include "train/sharded_optimizer/flat_parameters.h"
#include <maniple/maniple.h>

namespace maniple::harness::sharded_optimizer_test {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

constexpr std::chrono::seconds kLimit(180);  // processes that load LibTorch take seconds to start on a busy machine

/// Where the tests train.
Tensor ones(torch::IntArrayRef sizes) { return torch::ones(sizes, training_device()); }

/// Whether ranks share the memory of parameters: on the host alone.
std::vector<bool> sharing() {
  return test_device().is_cpu() ? std::vector<bool>{false, true} : std::vector<bool>{false};
}

/// The same bits. On a GPU a slice may be stepped by another kernel than the whole.
void expect_same(const Parameters& actual, const Parameters& expected, const std::string& what) {
  if (test_device().is_cpu()) return expect_equal(actual, expected, what);
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double tolerance = expected[i].element_size() == 2 ? 2e-2 : 1e-5;
    EXPECT_TRUE(torch::allclose(actual[i].detach(), expected[i].detach(), tolerance, tolerance))
        << what << ", parameter " << i;
  }
}

// ---- Where parameters are cut ---------------------------------------------------------------------------------------

TEST(CutEvenly, PartsHaveSimilarCosts) {
  const std::vector<CutMember> members = {{64, 16, 4}, {0, 16, 4}, {1600, 16, 4}, {48, 0, 8}, {320, 32, 12}};
  for (int parts = 1; parts <= 40; ++parts) {
    const std::vector<CutPoint> points = cut_evenly(members, parts);
    ASSERT_EQ(points.size(), static_cast<std::size_t>(parts - 1));
    std::int64_t total = 0, largest = 0, before = 0;
    std::vector<std::int64_t> starts;
    for (const CutMember& member : members) {
      starts.push_back(total);
      total += member.elements * member.cost;
    }
    starts.push_back(total);
    for (int i = 0; i <= parts - 1; ++i) {
      const CutPoint point = i == parts - 1 ? CutPoint{members.size(), 0} : points[static_cast<std::size_t>(i)];
      std::int64_t at = starts[point.member];
      if (point.element != 0) {
        ASSERT_NE(members[point.member].unit, 0) << "cut where it must not be";
        EXPECT_EQ(point.element % members[point.member].unit, 0);
        EXPECT_LT(point.element, members[point.member].elements);
        at += point.element * members[point.member].cost;
      }
      EXPECT_GE(at, before);
      largest = std::max(largest, at - before);
      before = at;
    }
    EXPECT_LE(largest, total / parts + 48 * 8 + 32 * 12) << parts;  // what may not be cut, and a unit
  }
}

// ---- The same bits --------------------------------------------------------------------------------------------------

/// Contiguous and not, channels last, empty, without dimensions, with gaps, frozen, of several dtypes.
Parameters some_parameters(torch::ScalarType dtype) {
  const auto make = [dtype](torch::IntArrayRef shape, int seed) { return numbers(shape, seed).to(dtype); };
  return {leaf(make({33, 7}, 1)),
          leaf(make({5}, 2)),
          leaf(make({}, 3)),
          leaf(make({0, 4}, 4)),
          leaf(make({6, 4, 3, 3}, 5).contiguous(at::MemoryFormat::ChannelsLast)),
          leaf(make({12, 9}, 6).t()),
          leaf(make({10, 10}, 7).narrow(1, 2, 5)),
          make({40}, 8).clone(),  // frozen
          leaf(numbers({50, 3}, 9).to(torch::kFloat64)),
          leaf(make({1000}, 10))};
}

/// Two groups: the second has a learning rate of its own.
template <class Options>
Groups in_groups(const Parameters& parameters, const Options& options) {
  const auto half = static_cast<std::ptrdiff_t>(parameters.size() / 2);
  Groups groups;
  groups.emplace_back(Parameters(parameters.begin(), parameters.begin() + half));
  auto other = std::make_unique<Options>(options);
  other->lr(options.lr() * 3).weight_decay(0.02);
  groups.emplace_back(Parameters(parameters.begin() + half, parameters.end()), std::move(other));
  return groups;
}

struct Case {
  std::string name;
  std::function<void(Rank&, bool shared)> run;
};

template <class T, class Options>
Case same_bits(const std::string& name, Options options, torch::ScalarType dtype = torch::kFloat32,
               optim::StepOptions step_options = {}) {
  return {name, [=](Rank& r, bool shared) {
            Parameters plain_parameters = some_parameters(dtype);
            Parameters parameters = copies_of(plain_parameters);
            if (r.rank != 0) {  // rank 0's are taken
              const torch::NoGradGuard no_grad;
              for (Tensor& one : parameters) one.add_(1);
            }
            T plain(in_groups(plain_parameters, options), options, step_options);
            ShardedOptimizer<T> sharded(in_groups(parameters, options), options, {r.world, shared}, step_options);
            expect_same(parameters, plain_parameters, "before the first step");
            for (int step = 0; step < 5; ++step) {
              set_gradients(plain_parameters, step);
              set_gradients(parameters, step);
              if (step == 3) {
                for (torch::optim::Optimizer* one :
                     {static_cast<torch::optim::Optimizer*>(&plain), static_cast<torch::optim::Optimizer*>(&sharded)}) {
                  one->param_groups()[0].options().set_lr(0.004);
                }
              }
              plain.step();
              sharded.step();
              expect_same(parameters, plain_parameters, format_text("after step {}", step));
            }
          }};
}

std::vector<Case> cases() {
  namespace t = torch::optim;
  const optim::StepOptions masters{.master_weights = true};
  return {same_bits<optim::SGD>("Sgd", t::SGDOptions(0.01)),
          same_bits<optim::SGD>("SgdMomentum", t::SGDOptions(0.01).momentum(0.9).weight_decay(0.1)),
          same_bits<optim::Adam>("Adam", t::AdamOptions(0.01).weight_decay(0.1)),
          same_bits<optim::AdamW>("AdamW", t::AdamWOptions(0.01).weight_decay(0.1)),
          same_bits<optim::AdamW>("AdamWAmsgrad", t::AdamWOptions(0.01).amsgrad(true)),
          same_bits<optim::Lion>("Lion", optim::LionOptions(0.01).weight_decay(0.1)),
          same_bits<optim::AdamW>("AdamWBfloat16", t::AdamWOptions(0.01), torch::kBFloat16),
          same_bits<optim::AdamW>("AdamWBfloat16Masters", t::AdamWOptions(0.01), torch::kBFloat16, masters),
          same_bits<optim::SGD>("SgdFloat16Masters", t::SGDOptions(0.01).momentum(0.9), torch::kFloat16, masters),
          same_bits<optim::Lion>("LionMaximize", optim::LionOptions(0.01), torch::kFloat32, {.maximize = true})};
}

class SameBits : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SameBits, testing::Values(1, 2, 3, 4));

TEST_P(SameBits, AsThePlainOptimizer) {
  run_ranks({.n = GetParam(), .limit = kLimit}, [](Rank& r) {
    for (const Case& one : cases()) {
      SCOPED_TRACE(one.name);
      for (const bool shared : sharing()) one.run(r, shared);
    }
  });
}

TEST(ShardedOptimizer, MoreRanksThanElements) {
  for (const bool shared : sharing()) {
    run_ranks({.n = 4}, [shared](Rank& r) {
      Parameters plain = {leaf(ones({1}))}, parameters = copies_of(plain);
      optim::AdamW reference(plain, 0.1);
      ShardedOptimizer<optim::AdamW> sharded(parameters, 0.1, {r.world, shared});
      for (int step = 0; step < 3; ++step) {
        set_gradients(plain, step), set_gradients(parameters, step);
        reference.step(), sharded.step();
        expect_same(parameters, plain, "one element");
        r.world->barrier();
      }
      std::int64_t bytes = static_cast<std::int64_t>(sharded.state_bytes());
      r.world->all_reduce(buffer_of(bytes));
      EXPECT_EQ(bytes, 8);
      Parameters none;
      ShardedOptimizer<optim::AdamW> empty(none, 0.1, {r.world, shared});
      empty.step();
    });
  }
}

TEST(ShardedOptimizer, OptimizersOfLibTorchAreDividedToo) {
  run_ranks({.n = 3}, [](Rank& r) {
    const auto check = [&]<class T>(std::type_identity<T>, auto options) {
      Parameters plain = {leaf(numbers({40, 5})), leaf(numbers({7}))}, parameters = copies_of(plain);
      T reference(plain, options);
      ShardedOptimizer<T> sharded(parameters, options, {r.world});
      for (int step = 0; step < 4; ++step) {
        set_gradients(plain, 2 * step), set_gradients(parameters, 2 * step);
        reference.step(), sharded.step();
      }
      for (std::size_t i = 0; i < plain.size(); ++i)
        EXPECT_TRUE(torch::allclose(parameters[i], plain[i], 1e-6, test_device().is_cpu() ? 1e-7 : 1e-6)) << i;
    };
    check(std::type_identity<torch::optim::Adam>(), torch::optim::AdamOptions(0.01));
    check(std::type_identity<torch::optim::RMSprop>(), torch::optim::RMSpropOptions(0.01));
    check(std::type_identity<torch::optim::Adagrad>(), torch::optim::AdagradOptions(0.01));
  });
}

// ---- In a training loop ---------------------------------------------------------------------------------------------

/// Everything at once: averaged gradients, accumulation, clipping, a scaler, a schedule, a group that comes later.
template <class Make>
Parameters trained(Rank& r, const Make& make) {
  // The bias before batch norm has a gradient of rounding errors alone, which Adam makes large: with the same bits
  // only.
  auto net = std::make_shared<NetImpl>(16, test_device().is_cpu());
  fill(*net, 3 + r.rank);
  DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
  Parameters first = net->fc1->parameters(), later = net->fc2->parameters();
  const auto optimizer = make(first);
  LrScheduler scheduler(*optimizer, lr::exponential(0.9));
  GradScaler scaler({.init_scale = 8});
  Accumulation accumulation(ddp, 2);
  for (int batch = 0; batch < 12; ++batch) {
    if (batch == 6) optimizer->add_param_group(torch::optim::OptimizerParamGroup(later));
    {
      const auto scope = accumulation.step();
      const Tensor loss = accumulation.scale(loss_of(ddp->forward(shard(numbers({12, 8}, batch), r.rank, r.size))));
      scaler.scale(loss).backward();
    }
    if (!accumulation.ready()) continue;
    scaler.unscale_(*optimizer);
    clip_grad_norm_(net->parameters(), 0.5);
    scaler.step(*optimizer);
    scaler.update();
    if (batch < 6) scheduler.step();
    r.world->barrier();
    net->zero_grad();
  }
  Parameters result;
  for (const Tensor& one : net->parameters()) result.push_back(one.detach().clone());
  return result;
}

TEST(ShardedOptimizer, TrainsAsThePlainOptimizerUnderDdp) {
  run_ranks({.n = 3}, [](Rank& r) {
    const torch::optim::AdamWOptions options = torch::optim::AdamWOptions(0.02).weight_decay(0.1);
    const Parameters plain =
        trained(r, [&](const Parameters& p) { return std::make_unique<optim::AdamW>(p, options); });
    for (const bool shared : sharing()) {
      const Parameters sharded = trained(r, [&](const Parameters& p) {
        return std::make_unique<ShardedOptimizer<optim::AdamW>>(p, options, ShardingOptions{r.world, shared});
      });
      expect_same(sharded, plain, shared ? "shared" : "not shared");
      r.world->barrier();
    }
  });
}

TEST(ShardedOptimizer, KeepsUpWithUnevenInputs) {
  run_ranks({.n = 3}, [](Rank& r) {
    const auto train = [&](const auto& make) {
      auto net = std::make_shared<NetImpl>();
      fill(*net, 5);
      DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
      const auto optimizer = make(net->parameters());
      UnevenInputsOptions options;
      options.shadow_step = [&](const std::function<void()>& backward) {
        net->zero_grad();
        backward();
        optimizer->step();
      };
      with_uneven_inputs(ddp, options, [&] {
        for (int batch = 0; batch < 2 + r.rank; ++batch) {
          net->zero_grad();
          loss_of(ddp->forward(numbers({4, 8}, 10 * r.rank + batch))).backward();
          optimizer->step();
        }
      });
      Parameters result;
      for (const Tensor& one : net->parameters()) result.push_back(one.detach().clone());
      return result;
    };
    const Parameters plain = train([](const Parameters& p) { return std::make_unique<optim::Adam>(p, 0.1); });
    for (const bool shared : sharing()) {
      const Parameters sharded = train([&](const Parameters& p) {
        return std::make_unique<ShardedOptimizer<optim::Adam>>(p, 0.1, ShardingOptions{r.world, shared});
      });
      expect_same(sharded, plain, shared ? "shared" : "not shared");
    }
  });
}

TEST(ShardedOptimizer, AClosureAndAGroupThatLibTorchAdded) {
  run_ranks({.n = 2}, [](Rank& r) {
    const Tensor a = leaf(ones({100})), b = leaf(ones({30}));
    ShardedOptimizer<optim::SGD> optimizer(Parameters{a}, 0.5, {r.world});
    torch::optim::Optimizer& base = optimizer;
    base.add_param_group(torch::optim::OptimizerParamGroup({b}));
    const Tensor used = a * 1;
    const Tensor loss = base.step([&] {
      const Tensor value = (a.sum() + 2 * b.sum());
      value.backward();
      return value;
    });
    EXPECT_EQ(loss.item<double>(), 160);
    EXPECT_TRUE(torch::equal(a.detach(), 0.5 * ones({100})));
    EXPECT_TRUE(torch::equal(b.detach(), 0 * ones({30})));
    // As after any change in place, a graph that needs the old values says so.
    const Tensor square = a * a;
    optimizer.step();
    EXPECT_THROW(square.sum().backward(), c10::Error);
  });
}

// ---- Shared parameters ----------------------------------------------------------------------------------------------

TEST(ShardedOptimizer, SharedParametersAreTheSameMemoryUntilUnshared) {
  run_ranks({.n = 3}, [](Rank& r) {
    Parameters parameters = {leaf(ones({1000})), leaf(torch::full({20, 3}, static_cast<double>(r.rank)))};
    ShardedOptimizer<optim::SGD> optimizer(parameters, 1.0, {r.world, true});
    EXPECT_TRUE(optimizer.shares_parameters());
    r.world->barrier();
    if (r.rank == 1) {
      const torch::NoGradGuard no_grad;
      parameters[1].fill_(7);
    }
    r.world->barrier();
    EXPECT_TRUE(torch::equal(parameters[1].detach(), torch::full({20, 3}, 7.0)));
    set_gradients(parameters, 0);
    optimizer.step();
    r.world->barrier();
    optimizer.unshare();
    EXPECT_FALSE(optimizer.shares_parameters());
    {
      const torch::NoGradGuard no_grad;
      parameters[1].fill_(r.rank);
    }
    r.world->barrier();
    EXPECT_TRUE(torch::equal(parameters[1].detach(), torch::full({20, 3}, static_cast<double>(r.rank))));
    EXPECT_TRUE(contains(catch_error([&] { optimizer.step(); }).text, "unshare() was called"));
  });
}

TEST(ShardedOptimizer, ARankKilledBeforeItsStepIsNamedByAllOthers) {
  for (const bool shared : sharing()) {
    run_ranks({.n = 3, .as = As::processes, .limit = kLimit, .fault = kill_at(1, 3)}, [=](Rank& r) {
      Parameters parameters = {leaf(ones({4000}))};
      ShardedOptimizer<optim::AdamW> optimizer(parameters, 0.1, {r.world, shared});
      const Caught caught = catch_error([&] {
        for (;;) {
          set_gradients(parameters, 0);
          synchronize_device();  // what the step before has enqueued
          r.phase("stepped");
          r.step();
          optimizer.step();
        }
      });
      EXPECT_TRUE(caught.is(ErrorKind::peer_lost)) << caught;
      EXPECT_EQ(caught.lost_rank, 1) << caught;
    });
  }
}

// ---- What it refuses ------------------------------------------------------------------------------------------------

TEST(ShardedOptimizer, DifferencesBetweenRanksAreErrorsOnAllOfThem) {
  run_ranks({.n = 3}, [](Rank& r) {
    const auto text_of = [&](const std::function<void()>& body) {
      const Caught caught = catch_error(body);
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
      return caught.text;
    };
    const Tensor other = leaf(ones({r.rank == 2 ? 5 : 4}));
    EXPECT_TRUE(contains(text_of([&] { ShardedOptimizer<optim::SGD>(Parameters{other}, 0.1, {r.world}); }),
                         "rank 2 has parameter 0 of group 0: Float [5]"));
    EXPECT_TRUE(contains(
        text_of([&] { ShardedOptimizer<optim::SGD>(Parameters{leaf(ones({3}))}, r.rank == 1 ? 0.2 : 0.1, {r.world}); }),
        "rank 1 has group.0.lr"));

    Parameters parameters = {leaf(ones({100})), leaf(ones({3}))};
    ShardedOptimizer<optim::SGD> optimizer(parameters, 0.1, {r.world});
    const auto step = [&] { optimizer.step(); };
    set_gradients(parameters, 0);
    if (r.rank == 1) parameters[1].mutable_grad() = Tensor();
    EXPECT_TRUE(contains(text_of(step), "rank 1 of the group has gradients for 1 parameters, rank 0 for 2;"));
    set_gradients(parameters, 0);
    if (r.rank == 2) optimizer.param_groups()[0].options().set_lr(0.3);
    EXPECT_TRUE(contains(text_of(step), "rank 2 of the group has another learning rate than rank 0"));
    optimizer.param_groups()[0].options().set_lr(0.1);
    if (r.rank == 1) parameters[0].mutable_grad() = ones({100}).to_sparse();
    EXPECT_TRUE(contains(text_of(step), r.rank == 1 ? "is sparse" : "rank 1 of the group cannot step"));
    set_gradients(parameters, 0);
    EXPECT_TRUE(torch::equal(parameters[0].detach(), ones({100}))) << "nothing was changed";
    step();  // and all is well again
    EXPECT_FALSE(torch::equal(parameters[0].detach(), ones({100})));
    if (r.rank == 2) parameters[0].set_data(parameters[0].detach().clone());
    EXPECT_TRUE(contains(text_of(step), r.rank == 2 ? "parameter 0 of group 0 no longer lies where the optimizer put it"
                                                    : "rank 2 of the group cannot step"));
  });
}

TEST(ShardedOptimizer, IndivisibleOptimizersAreRefused) {
  run_ranks({.n = 2}, [](Rank& r) {
    const Tensor memory = ones({100});
    const Parameters tied = {leaf(memory.narrow(0, 0, 60)), leaf(memory.narrow(0, 50, 50))};
    EXPECT_TRUE(contains(catch_error([&] { ShardedOptimizer<optim::SGD>(tied, 0.1, {r.world}); }).text,
                         "parameter 0 of group 0 and parameter 1 of group 0 share memory"));
    EXPECT_TRUE(contains(catch_error([&] {
                           ShardedOptimizer<torch::optim::SGD>(Parameters{leaf(ones({3}))}, 0.1, {r.world},
                                                               {.master_weights = true});
                         }).text,
                         "StepOptions are for the optimizers of maniple::optim"));
    if (!test_device().is_cpu()) {
      const Caught refused =
          catch_error([&] { ShardedOptimizer<optim::SGD>(Parameters{leaf(ones({3}))}, 0.1, {r.world, true}); });
      EXPECT_TRUE(refused.is(ErrorKind::invalid_argument)) << refused;
      EXPECT_TRUE(contains(refused.text, "is on cuda:0; shared_parameters is for the CPU")) << refused;
    }
    ShardedOptimizer<optim::SGD> optimizer(Parameters{leaf(ones({3}))}, 0.1, {r.world});
    torch::serialize::OutputArchive archive;
    const Caught caught = catch_error([&] { optimizer.save(archive); });
    EXPECT_TRUE(caught.is(ErrorKind::unsupported)) << caught;
    EXPECT_TRUE(contains(caught.text, "use Checkpoint")) << caught;
    EXPECT_TRUE(contains(catch_error([&] { optimizer.unshare(); }).text, "without shared_parameters"));
    optimizer.param_groups()[0].params().clear();
    EXPECT_TRUE(contains(catch_error([&] { optimizer.step(); }).text, "has lost parameters"));
  });
}

}  // namespace
}  // namespace maniple::harness::sharded_optimizer_test
