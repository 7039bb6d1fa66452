// The state of a ShardedOptimizer: who holds which part, and checkpoints that any number of ranks and the plain
// optimizer load.
#include <map>
#include <set>
#include <sstream>

#include "harness/run_ranks.h"
#include "harness/shared_folder.h"
#include "train/optim/stepped_parameters.h"
#include <maniple/maniple.h>

namespace maniple::harness::sharded_state_test {
namespace {

TEST(ShardedOptimizer, EveryRankHoldsItsPartOfTheState) {
  run_ranks({.n = 4}, [](Rank& r) {
    Parameters parameters = {leaf(numbers({1000, 37})), leaf(numbers({1000})), leaf(numbers({64, 64}))};
    ShardedOptimizer<optim::AdamW> optimizer(parameters, 0.1, {r.world});
    EXPECT_TRUE(optimizer.shards().empty());
    set_gradients(parameters, 0);
    optimizer.step();
    const std::size_t whole = 2 * 4 * (37000 + 1000 + 4096);
    EXPECT_LE(optimizer.state_bytes(), whole / 4 + 256);
    EXPECT_GE(optimizer.state_bytes(), whole / 4 - 256);
    std::vector<std::int64_t> held(2 * 3, 0);
    for (const ShardOf& shard : optimizer.shards()) {
      EXPECT_EQ(shard.local.numel(), shard.count);
      EXPECT_TRUE(shard.local.is_contiguous());
      for (std::size_t i = 0; i < 3; ++i) {
        if (shard.name == format_text("group.0.parameter.{}.exp_avg", i)) held[i] += shard.count;
        if (shard.name == format_text("group.0.parameter.{}.exp_avg_sq", i)) held[3 + i] += shard.count;
      }
    }
    r.world->all_reduce(buffer_of(held));
    EXPECT_EQ(held, (std::vector<std::int64_t>{37000, 1000, 4096, 37000, 1000, 4096}));
  });
}

Parameters checkpointed_parameters(torch::ScalarType dtype) {
  return {leaf(numbers({30, 11}, 1).to(dtype)), leaf(numbers({9}, 2).to(dtype)),
          leaf(numbers({4, 3, 2, 2}, 3).contiguous(at::MemoryFormat::ChannelsLast)), leaf(numbers({200}, 4).to(dtype))};
}

/// For checkpoints, which load into the parameters of a module.
std::shared_ptr<torch::nn::Module> module_of(const Parameters& parameters) {
  auto module = std::make_shared<torch::nn::Module>();
  for (std::size_t i = 0; i < parameters.size(); ++i) module->register_parameter(format_text("p{}", i), parameters[i]);
  return module;
}

constexpr int kHalf = 3;
constexpr std::chrono::seconds kLimit(180);  // processes that load LibTorch take seconds to start on a busy machine

/// The same bits. On a GPU a slice may be stepped by another kernel than the whole.
bool same(const Tensor& actual, const Tensor& expected) {
  if (test_device().is_cpu()) return torch::equal(actual, expected);
  const double tolerance = expected.element_size() == 2 ? 2e-2 : 1e-5;
  return torch::allclose(actual.cpu(), expected.cpu(), tolerance, tolerance);
}

/// Steps `from` to `from` + kHalf on parameters that a checkpoint brings along, if there is one.
template <class Optimizer>
void train_half(Parameters& parameters, Optimizer& optimizer, const std::string& folder,
                const std::shared_ptr<ProcessGroup>& group, bool all_write, int from) {
  Checkpoint checkpoint({.folder = folder, .background = false, .sharded = all_write, .group = group});
  const auto module = module_of(parameters);
  checkpoint.add("optimizer", optimizer).add("model", *module);
  EXPECT_EQ(checkpoint.load().value_or(0), from);
  for (int step = from; step < from + kHalf; ++step) {
    set_gradients(parameters, step);
    optimizer.step();
  }
  checkpoint.save(from + kHalf);
  EXPECT_EQ(checkpoint.last_error(), "");
}

/// `n` ranks; 0: one process with the plain optimizer, the parent.
void run_half(int n, bool shared, bool all_write, torch::ScalarType dtype, const SharedFolder& folder, int from) {
  const auto options = torch::optim::AdamWOptions(0.01).weight_decay(0.1);
  const optim::StepOptions masters{.master_weights = dtype != torch::kFloat32};
  if (n == 0) {
    if (is_child()) return;
    Parameters parameters = checkpointed_parameters(dtype);
    optim::AdamW optimizer(parameters, options, masters);
    return train_half(parameters, optimizer, SharedFolder::here(), nullptr, all_write, from);
  }
  run_ranks({.n = n, .limit = kLimit, .env = folder.env()}, [&](Rank& r) {
    Parameters parameters = checkpointed_parameters(dtype);
    ShardedOptimizer<optim::AdamW> optimizer(parameters, options, {r.world, shared}, masters);
    train_half(parameters, optimizer, SharedFolder::here(), r.world, all_write, from);
  });
}

TEST(ShardedOptimizer, CheckpointsFitEveryNumberOfRanksAndThePlainOptimizer) {
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16}) {
    Parameters expected = checkpointed_parameters(dtype);
    optim::AdamW reference(expected, torch::optim::AdamWOptions(0.01).weight_decay(0.1),
                           optim::StepOptions{.master_weights = dtype != torch::kFloat32});
    for (int step = 0; step < 2 * kHalf; ++step) {
      set_gradients(expected, step);
      reference.step();
    }
    const auto dict = optim::state_dict(reference);
    std::vector<std::pair<bool, bool>> ways = {{false, false}, {true, false}, {false, true}};
    if (!test_device().is_cpu()) ways.erase(ways.begin() + 1);  // host memory is shared
    for (const auto& [first, second] : std::vector<std::pair<int, int>>{{0, 3}, {3, 0}, {3, 2}, {2, 4}}) {
      for (const auto& [shared, all_write] : ways) {
        const SharedFolder folder;
        run_half(first, shared, all_write, dtype, folder, 0);
        run_half(second, shared, all_write, dtype, folder, kHalf);
        if (is_child()) continue;
        Parameters loaded = checkpointed_parameters(dtype);
        optim::AdamW plain(loaded, 0.5, optim::StepOptions{.master_weights = dtype != torch::kFloat32});
        Checkpoint checkpoint({.folder = SharedFolder::here()});
        const auto module = module_of(loaded);
        checkpoint.add("optimizer", plain).add("model", *module);
        EXPECT_EQ(checkpoint.load().value_or(0), 2 * kHalf);
        for (std::size_t i = 0; i < expected.size(); ++i)
          EXPECT_TRUE(same(loaded[i].detach(), expected[i].detach()))
              << first << " ranks, then " << second << (all_write ? ", all write" : "") << ", parameter " << i;
        const auto own = optim::state_dict(plain);
        EXPECT_EQ(own.size(), dict.size());
        for (const auto& [name, tensor] : dict) EXPECT_TRUE(own.count(name) != 0 && same(own.at(name), tensor)) << name;
      }
    }
  }
}

TEST(ShardedOptimizer, ShardsFillAnEmptyOptimizer) {
  run_ranks({.n = 3}, [](Rank& r) {
    Parameters parameters = checkpointed_parameters(torch::kBFloat16), others = copies_of(parameters);
    const optim::StepOptions masters{.master_weights = true};
    ShardedOptimizer<optim::AdamW> one(parameters, 0.01, {r.world}, masters), other(others, 0.5, {r.world}, masters);
    for (int step = 0; step < 2; ++step) {
      set_gradients(parameters, step);
      one.step();
    }
    {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < others.size(); ++i) others[i].copy_(parameters[i]);
    }
    std::map<std::string, std::string> texts;
    std::set<std::string> names;
    std::string mine;
    for (const auto& [name, text] : one.state_texts()) mine += name + "=" + text + "\n";
    for (const ShardOf& shard : one.shards()) mine += shard.name + "\n";
    for (const std::string& list : r.world->all_gather_objects(mine)) {
      std::istringstream lines(list);
      for (std::string line; std::getline(lines, line);) {
        const std::size_t equals = line.find('=');
        if (equals == std::string::npos) names.insert(line);
        if (equals != std::string::npos) texts[line.substr(0, equals)] = line.substr(equals + 1);
      }
    }
    const std::vector<ShardOf> from = one.shards(), to = other.begin_load(texts, names);
    ASSERT_EQ(from.size(), to.size());
    for (std::size_t i = 0; i < to.size(); ++i) {
      EXPECT_EQ(to[i].name, from[i].name);
      EXPECT_EQ(to[i].shape, from[i].shape);
      EXPECT_EQ(to[i].offset, from[i].offset);
      to[i].local.copy_(from[i].local.reshape(to[i].local.sizes()));
    }
    set_gradients(parameters, 2), set_gradients(others, 2);
    one.step(), other.step();
    for (std::size_t i = 0; i < others.size(); ++i)
      EXPECT_TRUE(same(others[i].detach(), parameters[i].detach())) << "filled by shards, parameter " << i;
  });
}

}  // namespace
}  // namespace maniple::harness::sharded_state_test
