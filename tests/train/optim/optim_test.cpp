// Optimizers of our own against torch::optim's: the same numbers, states and checkpoints.
#include <gtest/gtest.h>

#include "harness/error_of.h"
#include "harness/run_ranks.h"
#include "harness/temporary_directory.h"
#include "train/gradients.h"
#include <maniple/train/checkpoint.h>
#include <maniple/train/ddp.h>
#include <maniple/train/optim.h>

namespace maniple::harness::optim_test {
namespace {

using torch::Tensor;
using Parameters = std::vector<Tensor>;
using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(Parameters)>;

struct Pair {
  std::string name;
  Make torch, ours, with_masters;
};

template <class Theirs, class Ours, class Options>
Pair pair(const std::string& name, Options options) {
  return {name, [=](Parameters p) { return std::make_unique<Theirs>(std::move(p), options); },
          [=](Parameters p) { return std::make_unique<Ours>(std::move(p), options); },
          [=](Parameters p) {
            return std::make_unique<Ours>(std::move(p), options, optim::StepOptions{.master_weights = true});
          }};
}

const std::vector<Pair>& pairs() {
  namespace t = torch::optim;
  static const std::vector<Pair> all = {
      pair<t::SGD, optim::SGD>("SGD", t::SGDOptions(0.01)),
      pair<t::SGD, optim::SGD>("SGD, weight decay", t::SGDOptions(0.01).weight_decay(0.1)),
      pair<t::SGD, optim::SGD>("SGD, momentum", t::SGDOptions(0.01).momentum(0.9).dampening(0.2)),
      pair<t::SGD, optim::SGD>("SGD, momentum, decay", t::SGDOptions(0.01).momentum(0.9).weight_decay(0.1)),
      pair<t::SGD, optim::SGD>("SGD, Nesterov", t::SGDOptions(0.01).momentum(0.9).nesterov(true)),
      pair<t::SGD, optim::SGD>("SGD, all", t::SGDOptions(0.01).momentum(0.9).nesterov(true).weight_decay(0.1)),
      pair<t::Adam, optim::Adam>("Adam", t::AdamOptions(0.01)),
      pair<t::Adam, optim::Adam>("Adam, decay", t::AdamOptions(0.01).weight_decay(0.1).betas({0.8, 0.95})),
      pair<t::Adam, optim::Adam>("Adam, amsgrad", t::AdamOptions(0.01).amsgrad(true)),
      pair<t::Adam, optim::Adam>("Adam, all", t::AdamOptions(0.01).amsgrad(true).weight_decay(0.1)),
      pair<t::AdamW, optim::AdamW>("AdamW", t::AdamWOptions(0.01).weight_decay(0.1)),
      pair<t::AdamW, optim::AdamW>("AdamW, amsgrad", t::AdamWOptions(0.01).amsgrad(true).eps(1e-4)),
  };
  return all;
}

const Pair& pair_named(const std::string& name) {
  return *std::find_if(pairs().begin(), pairs().end(), [&](const Pair& pair) { return pair.name == name; });
}

Tensor leaf(const Tensor& values) { return values.detach().requires_grad_(); }

/// Contiguous and not, channels last, empty, without dimensions, with gaps.
Parameters some_parameters(torch::ScalarType dtype) {
  const auto make = [dtype](torch::IntArrayRef shape, int seed) { return numbers(shape, seed).to(dtype); };
  return {leaf(make({3, 5}, 1)),
          leaf(make({77}, 2)),
          leaf(make({4, 6}, 3).t()),
          leaf(make({2, 3, 4, 5}, 4).contiguous(torch::MemoryFormat::ChannelsLast)),
          leaf(make({0}, 5)),
          leaf(make({}, 6)),
          leaf(make({6, 8}, 7).slice(1, 1, 6)),
          leaf(make({40, 33}, 8))};
}

void set_gradients(const Parameters& parameters, int step, bool contiguous = false) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Tensor values = numbers(parameters[i].sizes(), 100 * step + static_cast<int>(i)).to(parameters[i].dtype());
    parameters[i].mutable_grad() = contiguous ? values : torch::empty_like(parameters[i].detach()).copy_(values);
  }
}

void train(torch::optim::Optimizer& optimizer, const Parameters& parameters, int from, int to) {
  for (int step = from; step < to; ++step) {
    set_gradients(parameters, step, step % 3 == 2);
    optimizer.step();
  }
}

/// Fused kernels of GPUs round in other places.
double within(double tolerance) { return training_device().is_cpu() ? tolerance : 10 * tolerance; }

double difference(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0) return 0;
  const Tensor x = a.detach().to(torch::kFloat64), y = b.detach().to(torch::kFloat64);
  return ((x - y).abs() / y.abs().clamp_min(1)).max().item<double>();
}

void expect_near(const Parameters& actual, const Parameters& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i)
    EXPECT_LE(difference(actual[i], expected[i]), within(tolerance)) << what << ", parameter " << i;
}

void expect_bits(const Parameters& actual, const Parameters& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i)
    EXPECT_TRUE(torch::equal(actual[i], expected[i])) << what << ", parameter " << i;
}

TEST(Optim, AfterTwentyStepsEqualsTorch) {
  for (const Pair& pair : pairs()) {
    for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
      const Parameters a = some_parameters(dtype), b = some_parameters(dtype);
      const auto theirs = pair.torch(a), ours = pair.ours(b);
      train(*theirs, a, 0, 20);
      train(*ours, b, 0, 20);
      expect_near(b, a, dtype == torch::kFloat64 ? 5e-15 : 1e-6, pair.name);
      for (const auto& [name, tensor] : optim::state_dict(*theirs)) {
        const auto dict = optim::state_dict(*ours);
        ASSERT_EQ(dict.count(name), 1u) << pair.name << " " << name;
        EXPECT_EQ(dict.at(name).scalar_type(), tensor.scalar_type()) << name;
        EXPECT_LE(difference(dict.at(name), tensor), within(1e-6)) << pair.name << " " << name;
      }
    }
  }
}

// What is neither on the CPU nor on a GPU, nor real, goes by ATen's lists of tensors.
TEST(Optim, ComplexNumbersEqualTorch) {
  for (const Pair& pair : pairs()) {
    if (pair.name.find("amsgrad") != std::string::npos || pair.name == "Adam, all") continue;  // no order
    const Parameters a = {leaf(torch::complex(numbers({5, 3}, 1), numbers({5, 3}, 2)))};
    const Parameters b = {leaf(a[0].detach().clone())};
    const auto theirs = pair.torch(a), ours = pair.ours(b);
    for (int step = 0; step < 5; ++step) {
      const Tensor gradient = torch::complex(numbers({5, 3}, step), numbers({5, 3}, 2 * step + 1));
      a[0].mutable_grad() = gradient.clone();
      b[0].mutable_grad() = gradient.clone();
      theirs->step(), ours->step();
    }
    EXPECT_TRUE(torch::allclose(torch::view_as_real(a[0].detach()), torch::view_as_real(b[0].detach()), 1e-5, 1e-6))
        << pair.name;
  }
}

TEST(Optim, SixteenBits) {
  for (const Pair& pair : pairs()) {
    for (const auto dtype : {torch::kBFloat16, torch::kFloat16}) {
      const double rounding = dtype == torch::kBFloat16 ? 1.0 / 256 : 1.0 / 2048;
      // The same training in float32, from the same numbers with the same gradients.
      const auto wide = [](const Parameters& narrow) {
        Parameters result;
        for (const Tensor& one : narrow) result.push_back(leaf(one.detach().to(torch::kFloat32)));
        return result;
      };
      const Parameters plain = some_parameters(dtype), exact = wide(plain), mastered = some_parameters(dtype);
      const auto ours = pair.ours(plain), reference = pair.torch(exact), masters = pair.with_masters(mastered);
      for (int step = 0; step < 20; ++step) {
        set_gradients(plain, step);
        set_gradients(mastered, step);
        for (std::size_t i = 0; i < exact.size(); ++i) exact[i].mutable_grad() = plain[i].grad().to(torch::kFloat32);
        ours->step(), reference->step(), masters->step();
      }
      // Squares of gradients are too small for float16.
      if (dtype == torch::kBFloat16 || pair.name.starts_with("SGD"))
        expect_near(plain, exact, 20 * rounding, pair.name);
      auto& copies = dynamic_cast<optim::MasterWeights&>(*masters);
      for (std::size_t i = 0; i < exact.size(); ++i) {
        const Tensor copy = copies.master_weight(mastered[i]);
        ASSERT_EQ(copy.scalar_type(), torch::kFloat32);
        EXPECT_LE(difference(copy, exact[i]), within(1e-6)) << pair.name << ", parameter " << i;
        EXPECT_TRUE(torch::equal(copy.to(dtype), mastered[i].detach())) << pair.name << ", parameter " << i;
      }
      for (const auto& [name, tensor] : optim::state_dict(*ours)) {
        if (name.find("exp_avg") != std::string::npos || name.find("buffer") != std::string::npos) {
          EXPECT_EQ(tensor.scalar_type(), dtype) << name;
          EXPECT_EQ(optim::state_dict(*masters).at(name).scalar_type(), torch::kFloat32) << name;
        }
      }
    }
  }
}

TEST(Optim, MasterWeightsKeepSmallSteps) {
  const Tensor weight = leaf(torch::ones({4}, torch::TensorOptions(torch::kBFloat16).device(training_device())));
  optim::SGD optimizer({weight}, torch::optim::SGDOptions(1e-3), {.master_weights = true});
  for (int step = 0; step < 16; ++step) {
    weight.mutable_grad() = torch::ones_like(weight.detach());
    optimizer.step();
  }
  EXPECT_EQ(weight[0].item<double>(), 0.984375) << "the nearest to 1 - 0.016; each step alone would be lost";
  weight.detach().fill_(3);
  optimizer.reset_master_weights();
  optimizer.step();
  EXPECT_EQ(weight[0].item<double>(), 3);
}

TEST(Optim, BitsDoNotDependOnTheNumberOfThreads) {
  const int before = at::get_num_threads();
  Parameters results;
  for (const int threads : {1, 3}) {
    at::set_num_threads(threads);
    const Parameters parameters = {leaf(numbers({1001, 701}, 1)), leaf(numbers({333}, 2)), leaf(numbers({400000}, 3))};
    optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(0.01));
    train(optimizer, parameters, 0, 2);
    for (const Tensor& one : parameters) results.push_back(one.detach());
  }
  at::set_num_threads(before);
  expect_bits({results.begin(), results.begin() + 3}, {results.begin() + 3, results.end()}, "threads");
}

TEST(Optim, GroupsClosuresAndParametersWithoutGradient) {
  const auto run = [](auto make) {
    Parameters p = {leaf(numbers({4}, 1)), leaf(numbers({5}, 2)), leaf(numbers({6}, 3))};
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(Parameters{p[0], p[1]});
    groups.emplace_back(Parameters{p[2]}, std::make_unique<torch::optim::AdamWOptions>(0.5));
    const auto optimizer = make(groups);
    for (int step = 0; step < 3; ++step) {
      const Tensor loss = optimizer->step([&] {
        optimizer->zero_grad();
        Tensor value = (p[0] * p[0]).sum() + p[2].pow(3).sum();
        value.backward();
        return value;
      });
      EXPECT_TRUE(loss.defined());
    }
    EXPECT_TRUE(torch::equal(p[1], numbers({5}, 2)));
    EXPECT_EQ(optimizer->state().size(), 2u);
    return p;
  };
  const torch::optim::AdamWOptions defaults(0.1);
  expect_near(run([&](auto groups) { return std::make_unique<optim::AdamW>(groups, defaults); }),
              run([&](auto groups) { return std::make_unique<torch::optim::AdamW>(groups, defaults); }), 1e-6,
              "groups");
}

TEST(Optim, Maximize) {
  const Parameters up = {leaf(numbers({7}, 1))}, down = {leaf(numbers({7}, 1))};
  optim::AdamW climbs(up, torch::optim::AdamWOptions(0.1), {.maximize = true});
  optim::AdamW falls(down, torch::optim::AdamWOptions(0.1));
  up[0].mutable_grad() = numbers({7}, 2);
  down[0].mutable_grad() = -numbers({7}, 2);
  climbs.step(), falls.step();
  expect_bits(up, down, "maximize");
}

TEST(Optim, MistakesAreNamed) {
  const Tensor dense = leaf(numbers({3}, 1)), table = leaf(numbers({4, 2}, 2));
  optim::AdamW optimizer(Parameters{dense, table});
  dense.mutable_grad() = torch::ones_like(dense.detach());
  table.mutable_grad() = torch::ones_like(table.detach()).to_sparse();
  EXPECT_NE(error_of([&] { optimizer.step(); }).find("optim::AdamW: the gradient of parameter 1 of group 0 is sparse"),
            std::string::npos);
  EXPECT_TRUE(torch::equal(dense, numbers({3}, 1))) << "nothing was changed";
  EXPECT_NE(error_of([&] { optim::SGD(Parameters{dense, dense}, torch::optim::SGDOptions(0.1)); }).find("twice"),
            std::string::npos);
  EXPECT_NE(error_of([&] { optim::Lion(Parameters{dense}, optim::LionOptions(-1)); }).find("rate of -1"),
            std::string::npos);
}

// A graph that needs the old values of a parameter is not given the new ones silently.
TEST(Optim, AParameterThatIsNeededLaterIsAnError) {
  const Tensor weight = leaf(numbers({3}, 1));
  optim::SGD optimizer(Parameters{weight}, torch::optim::SGDOptions(0.1));
  const Tensor loss = (weight * weight).sum();
  weight.mutable_grad() = torch::ones_like(weight.detach());
  optimizer.step();
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(Optim, Lion) {
  const auto options = optim::LionOptions(0.01).betas({0.9, 0.98}).weight_decay(0.1);
  const Parameters parameters = some_parameters(torch::kFloat32);
  optim::Lion lion(parameters, options);
  Parameters expected, average;
  for (const Tensor& one : parameters) {
    expected.push_back(one.detach().clone());
    average.push_back(torch::zeros_like(expected.back()));
  }
  for (int step = 0; step < 10; ++step) {
    train(lion, parameters, step, step + 1);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const Tensor& g = parameters[i].grad();
      expected[i] = expected[i] * (1 - 0.01 * 0.1) - 0.01 * (average[i] * 0.9 + g * 0.1).sign();
      average[i] = average[i] * 0.98 + g * 0.02;
    }
  }
  expect_near(parameters, expected, 1e-6, "Lion");

  std::stringstream archive;  // LibTorch's own, too
  torch::save(lion, archive);
  optim::Lion again(parameters);
  torch::load(again, archive);
  EXPECT_TRUE(
      torch::equal(optim::state_dict(again).at("state.7.exp_avg"), optim::state_dict(lion).at("state.7.exp_avg")));
}

// ---- State in checkpoints and dicts ---------------------------------------------------------------------------------

Parameters copies_of(const Parameters& parameters) {
  Parameters result;
  for (const Tensor& one : parameters) result.push_back(one.detach().clone());
  return result;
}

void copy_values(const Parameters& from, const Parameters& to) {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
}

TEST(Optim, AnInterruptedRunEndsWithTheSameBits) {
  std::vector<std::pair<std::string, Make>> makes;
  for (const char* name : {"SGD, momentum, decay", "Adam, all", "AdamW"}) {  // each save waits for the disk
    makes.emplace_back(name, pair_named(name).ours);
    makes.emplace_back(std::string(name) + ", masters", pair_named(name).with_masters);
  }
  makes.emplace_back("Lion", [](Parameters p) { return std::make_unique<optim::Lion>(std::move(p)); });
  for (const auto& [name, make] : makes) {
    const auto dtype = name.ends_with("masters") ? torch::kBFloat16 : torch::kFloat32;
    const Parameters straight = some_parameters(dtype), first = some_parameters(dtype), second = some_parameters(dtype);
    const auto whole = make(straight);
    train(*whole, straight, 0, 10);

    const TemporaryDirectory folder;
    const auto before = make(first), after = make(second);
    train(*before, first, 0, 5);
    Checkpoint({.folder = folder.path()}).add("optimizer", *before).save(5);
    const Parameters values = copies_of(first);
    train(*after, second, 50, 52);  // something else, to be replaced
    EXPECT_EQ(Checkpoint({.folder = folder.path()}).add("optimizer", *after).load(), std::optional<std::int64_t>(5));
    copy_values(values, second);
    train(*after, second, 5, 10);
    expect_bits(second, straight, name);
  }
}

TEST(Optim, TorchSaveKeepsMasterWeights) {
  for (const char* name : {"SGD, momentum, decay", "AdamW"}) {
    const Pair pair = pair_named(name);
    const Parameters straight = some_parameters(torch::kBFloat16), other = some_parameters(torch::kBFloat16);
    const auto before = pair.with_masters(straight), after = pair.with_masters(other);
    train(*before, straight, 0, 5);
    std::stringstream archive;
    torch::save(*before, archive);
    train(*after, other, 50, 52);  // something else, to be replaced
    torch::load(*after, archive);
    copy_values(straight, other);
    train(*before, straight, 5, 10);
    train(*after, other, 5, 10);
    expect_bits(other, straight, name);
    archive.clear(), archive.seekg(0);
    torch::load(*pair.torch(other), archive);  // without the copies
  }
}

// From torch::optim's checkpoint to ours, and back.
TEST(Optim, CheckpointsAreInterchangeableWithTorch) {
  for (const char* name : {"SGD, momentum", "Adam, all", "AdamW"}) {
    const Pair pair = pair_named(name);
    for (const bool from_torch : {true, false}) {
      const Parameters reference = some_parameters(torch::kFloat64), a = some_parameters(torch::kFloat64),
                       b = some_parameters(torch::kFloat64);
      const auto whole = pair.torch(reference);
      train(*whole, reference, 0, 10);
      const auto before = (from_torch ? pair.torch : pair.ours)(a), after = (from_torch ? pair.ours : pair.torch)(b);
      const TemporaryDirectory folder;
      train(*before, a, 0, 5);
      Checkpoint({.folder = folder.path()}).add("optimizer", *before).save(5);
      Checkpoint({.folder = folder.path()}).add("optimizer", *after).load();
      copy_values(a, b);
      train(*after, b, 5, 10);
      expect_near(b, reference, 5e-15, pair.name);
    }
  }
}

// ---- With DistributedDataParallel, whose gradients are views into buckets -------------------------------------------

Parameters trained(Rank& r, const Make& make, bool in_backward, bool view) {
  auto net = std::make_shared<NetImpl>(16);
  fill(*net, 3);
  DistributedDataParallel<NetImpl> ddp(net, {.bucket_cap_mb = kTiny,
                                             .first_bucket_mb = kTiny,
                                             .gradient_as_bucket_view = view,
                                             .group = r.world,
                                             .overlap = Overlap::inline_});
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (in_backward) {
    ddp.apply_optimizer_in_backward([&](const std::string&, const Tensor& parameter) {
      return std::shared_ptr<torch::optim::Optimizer>(make({parameter}));
    });
  } else {
    optimizer = make(net->parameters());
  }
  const Tensor batch = numbers({12, 8}, 1);
  for (int step = 0; step < 4; ++step) {
    net->zero_grad();
    loss_of(ddp(shard(batch, r.rank, r.size))).backward();
    if (optimizer) optimizer->step();
  }
  expect_same_everywhere(r, *net, false);
  return copies_of(net->parameters());
}

TEST(Optim, WithGradientsInBuckets) {
  for (const int n : {1, 2, 3}) {
    run_ranks({.n = n}, [](Rank& r) {
      for (const char* name : {"SGD, all", "AdamW"}) {
        const Pair pair = pair_named(name);
        const Parameters after = trained(r, pair.ours, false, true);
        expect_near(after, trained(r, pair.torch, false, true), 1e-6, name);
        expect_bits(trained(r, pair.ours, false, false), after, "gradients outside of buckets");
        expect_bits(trained(r, pair.ours, true, true), after, "step in backward");
      }
    });
  }
}

}  // namespace
}  // namespace maniple::harness::optim_test
