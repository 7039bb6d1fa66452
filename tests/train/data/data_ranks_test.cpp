// The data side on real ranks: the sampler finds the group by itself, and a whole training run repeats to the last bit.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>

#include "comm/base/format.h"
#include "harness/run_ranks.h"
#include <maniple/maniple.h>

namespace maniple::data_ranks_test {
namespace {

using harness::As;
using harness::Rank;
using harness::run_ranks;

/// FNV-1a over the bits of all parameters.
std::string fingerprint(const torch::nn::Module& module) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const auto& parameter : module.parameters()) {
    const auto flat = parameter.detach().contiguous();
    const auto* bytes = static_cast<const unsigned char*>(flat.data_ptr());
    for (std::size_t i = 0; i < flat.nbytes(); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
  }
  return format_text("{:016x}", hash);
}

/// Two short epochs on drawn digits, with dropout that differs between ranks and a loader with a worker.
std::string train(int rank, std::uint64_t seed) {
  torch::set_num_threads(1);
  seed_all(seed, static_cast<std::uint64_t>(rank));
  torch::nn::Sequential net(torch::nn::Flatten(), torch::nn::Linear(784, 32), torch::nn::ReLU(),
                            torch::nn::Dropout(0.5), torch::nn::Linear(32, 10), torch::nn::LogSoftmax(1));
  DistributedDataParallel ddp(net);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  auto digits = Mnist::drawn(301, 1);
  DistributedSampler sampler(301, {.seed = seed});
  auto loader = torch::data::make_data_loader(digits.map(torch::data::transforms::Stack<>()), sampler,
                                              torch::data::DataLoaderOptions().batch_size(16).workers(1));
  for (std::size_t epoch = 0; epoch < 2; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      torch::nll_loss(net->forward(batch.data), batch.target).backward();
      optimizer.step();
    }
  }
  return fingerprint(*net);
}

std::map<int, std::string> weights_of_a_run(std::uint64_t seed) {
  const auto result = run_ranks({.n = 2, .as = As::processes}, [&](Rank& r) {
    init_process_group(r.world);
    r.report("weights", train(r.rank, seed));
    destroy_process_group();
  });
  return result ? result.texts("weights") : std::map<int, std::string>{};
}

TEST(Reproducible, TwoRunsGiveTheSameBits) {
  const auto first = weights_of_a_run(7);
  const auto second = weights_of_a_run(7);
  const auto other = weights_of_a_run(8);
  if (harness::is_child()) return;
  ASSERT_EQ(first.size(), 2u);
  EXPECT_EQ(first.at(0), first.at(1)) << "ranks differ";
  EXPECT_EQ(first, second);
  EXPECT_NE(first, other);
}

TEST(SamplerOnRanks, TakesRankAndSizeFromTheGroup) {
  run_ranks({.n = 3, .as = As::processes}, [](Rank& r) {
    const DistributedSampler given(10, {.shuffle = false, .group = r.world});
    EXPECT_EQ(given.rank(), r.rank);
    EXPECT_EQ(given.num_replicas(), 3);
    init_process_group(r.world);
    const DistributedSampler found(10, {.shuffle = false});
    EXPECT_EQ(found.indices(), given.indices());
    // A group of two, in the other order: the place in it counts.
    const auto pair = new_group({2, 0});
    if (pair->is_member()) {
      const DistributedSampler part(10, {.shuffle = false, .group = pair});
      EXPECT_EQ(part.rank(), r.rank == 2 ? 0 : 1);
      EXPECT_EQ(part.num_replicas(), 2);
    }
    // Over the ranks, evaluation counts every sample once.
    DistributedSampler exact(10, {.mode = SamplerMode::evaluation});
    auto seen = torch::zeros({10}, torch::kInt64);
    for (const std::size_t index : exact.indices()) seen[static_cast<std::int64_t>(index)] += 1;
    all_reduce(seen);
    EXPECT_TRUE(seen.eq(1).all().item<bool>());
    barrier();
    destroy_process_group();
  });
}

}  // namespace
}  // namespace maniple::data_ranks_test
