// Data-parallel training with sharded checkpoints, and `maniple checkpoint` on what it saved.
#include <sys/wait.h>

#include <cstdio>
#include <fstream>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "harness/run_ranks.h"
#include "harness/shared_folder.h"
#include "train/checkpoint/checkpoint_folder.h"
#include "train/checkpoint/checkpoint_index.h"
#include "train/models.h"
#include <maniple/train/checkpoint.h>
#include <maniple/train/ddp.h>

namespace maniple::harness::sharded_training_test {
namespace {

using maniple::testing_models::training_device;

constexpr std::chrono::seconds kLimit(180);  // processes that load LibTorch take seconds to start on a busy machine

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(6, 300));
    norm = register_module("norm", torch::nn::BatchNorm1d(300));
    second = register_module("second", torch::nn::Linear(300, 1000));
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(norm(torch::relu(first(x)))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

/// A data-parallel run, with everything that one has.
struct Training {
  Training(const std::string& folder, const Rank& r, bool sharded, bool background = true)
      : optimizer(net->parameters(), 0.01),
        ddp(net, {.group = r.world}),
        checkpoint({.folder = folder, .background = background, .sharded = sharded, .group = r.world}) {
    checkpoint.add("model", *net).add("optimizer", optimizer).add("seen", seen);
  }
  /// Ranks are threads here, with one generator of random numbers: these have their own.
  static Net made() {
    Net net;
    const torch::NoGradGuard no_grad;
    const auto random = at::detail::createCPUGenerator(7);
    for (auto& parameter : net->parameters()) parameter.uniform_(-0.1, 0.1, random);
    net->to(training_device());
    return net;
  }
  void train(int steps, const Rank& r) {
    for (int i = 0; i < steps; ++i) {
      const auto random = at::detail::createCPUGenerator(static_cast<std::uint64_t>(1000 * seen + r.rank));
      const auto x = torch::randn({4, 6}, random).to(training_device());
      optimizer.zero_grad();
      ddp.forward(x).pow(2).mean().backward();
      optimizer.step();
      ++seen;
    }
  }
  Net net = made();
  torch::optim::AdamW optimizer;
  DistributedDataParallel<Net> ddp;
  std::int64_t seen = 0;
  Checkpoint checkpoint;
};

std::vector<torch::Tensor> parameters_of(const Training& run) {
  std::vector<torch::Tensor> all;
  for (const auto& parameter : run.net->parameters()) all.push_back(parameter.detach().cpu().clone());
  return all;
}

/// The same bits. On a GPU a library may choose another kernel for the same step.
bool same(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return test_device().is_cpu() ? x.equal(y) : torch::allclose(x, y, 1e-5, 1e-5);
  });
}

TEST(ShardedCheckpoint, AnInterruptedRunEndsWithTheSameBits) {
  const SharedFolder shared;
  for (const bool sharded : {true, false}) {  // what the second run loads with
    run_ranks({.n = 3, .limit = kLimit, .env = shared.env()}, [&](Rank& r) {
      Training straight(SharedFolder::here() + "/none", r, true);
      straight.train(2, r);
      const std::string path = SharedFolder::here() + (sharded ? "/a" : "/b");
      {
        Training before(path, r, true);
        before.train(1, r);
        before.checkpoint.save(1);
        before.train(1, r);  // changes everything while it is written
        EXPECT_TRUE(same(parameters_of(before), parameters_of(straight)));
      }
      r.world->barrier();
      Training after(path, r, sharded);
      EXPECT_EQ(after.checkpoint.load(), std::optional<std::int64_t>(1));
      after.train(1, r);
      EXPECT_TRUE(same(parameters_of(after), parameters_of(straight)));
      after.checkpoint.save(2);  // both kinds in one folder
      after.checkpoint.wait();
      r.world->barrier();
      Training again(path, r, !sharded);
      EXPECT_EQ(again.checkpoint.load(), std::optional<std::int64_t>(2));
      EXPECT_TRUE(same(parameters_of(again), parameters_of(straight)));
    });
  }
}

TEST(ShardedCheckpoint, EveryRankWritesItsShare) {
  const SharedFolder shared;
  run_ranks({.n = 4, .limit = kLimit, .env = shared.env()}, [](Rank& r) {
    Training run(SharedFolder::here(), r, true, false);
    run.checkpoint.save(1);
    EXPECT_EQ(run.checkpoint.last_error(), "");
  });
  const CheckpointManifest manifest = verify_checkpoint(SharedFolder::here(), 1);
  EXPECT_EQ(manifest.files.size(), 5u);
  std::uint64_t least = UINT64_MAX, most = 0;
  for (const auto& [name, digest] : manifest.files) {
    if (name == kIndexFile) continue;
    least = std::min(least, digest.bytes), most = std::max(most, digest.bytes);
  }
  EXPECT_LT(static_cast<double>(most), 1.1 * static_cast<double>(least)) << least << " and " << most;
}

/// What `maniple checkpoint` prints, and its exit status.
std::pair<int, std::string> maniple_checkpoint(const std::string& arguments) {
  FILE* pipe = ::popen((MANIPLE_PROGRAM " checkpoint " + arguments + " 2>&1").c_str(), "r");
  std::string text;
  for (int c; pipe != nullptr && (c = std::fgetc(pipe)) != EOF;) text += static_cast<char>(c);
  const int status = pipe == nullptr ? -1 : ::pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text};
}

TEST(ShardedCheckpoint, TheProgramListsVerifiesMergesAndSplits) {
  const SharedFolder shared;
  const std::string folder = SharedFolder::here();
  const std::string saved = folder + "/saved", one = folder + "/one", five = folder + "/five",
                    then = folder + "/then.pt";
  run_ranks({.n = 3, .limit = kLimit, .env = shared.env()}, [&](Rank& r) {
    Training run(saved, r, true, false);
    run.train(1, r);
    run.checkpoint.save(4);
    run.train(1, r);
    run.checkpoint.save(9);
    if (r.rank == 0) torch::save(parameters_of(run), then);
  });
  int status = 0;
  std::string text;
  if (!is_child()) {
    std::tie(status, text) = maniple_checkpoint("ls " + saved);
    EXPECT_EQ(status, 0);
    EXPECT_NE(text.find("model optimizer random seen"), std::string::npos) << text;
    EXPECT_EQ(maniple_checkpoint("verify " + saved).first, 0);
    std::tie(status, text) = maniple_checkpoint("merge " + saved + " " + one);
    EXPECT_EQ(status, 0) << text;
    EXPECT_EQ(text, one + "/" + checkpoint_name(9) + "\n");
    std::tie(status, text) = maniple_checkpoint("split " + one + " " + five + " 5");
    EXPECT_EQ(status, 0) << text;
    EXPECT_EQ(maniple_checkpoint("verify " + five).first, 0);
    EXPECT_EQ(verify_checkpoint(five, 9).files.size(), 6u);
  }
  for (const std::string& path : {one, five}) {
    run_ranks({.n = 2, .limit = kLimit, .env = shared.env()}, [&](Rank& r) {
      Training run(path, r, path == five);
      EXPECT_EQ(run.checkpoint.load(), std::optional<std::int64_t>(9));
      std::vector<torch::Tensor> expected;
      torch::load(expected, then);
      EXPECT_TRUE(same(parameters_of(run), expected));
      EXPECT_EQ(run.seen, 2);
    });
  }
  std::tie(status, text) = maniple_checkpoint("merge " + saved + " " + one);
  EXPECT_EQ(status, 2);
  EXPECT_NE(text.find("holds checkpoints"), std::string::npos) << text;
  EXPECT_EQ(maniple_checkpoint("ls " + folder).first, 2);
  EXPECT_EQ(maniple_checkpoint("split " + saved + " " + folder + "/none 0").first, 2);

  const std::string damaged = saved + "/" + checkpoint_name(9) + "/" + rank_file_name(1, 3);
  std::fstream(damaged, std::ios::binary | std::ios::in | std::ios::out).seekp(-3, std::ios::end).put('~');
  std::tie(status, text) = maniple_checkpoint("verify " + saved);
  EXPECT_EQ(status, 1);
  EXPECT_NE(text.find("DAMAGED: " + damaged), std::string::npos) << text;
  EXPECT_NE(text.find(checkpoint_name(4) + ": ok"), std::string::npos) << text;
  std::tie(status, text) = maniple_checkpoint("merge " + saved + " " + folder + "/before");
  EXPECT_EQ(status, 0);
  EXPECT_NE(text.find("/before/" + checkpoint_name(4)), std::string::npos) << text;
  EXPECT_EQ(maniple_checkpoint("merge " + saved + " " + folder + "/none --step 9").first, 1);
}

}  // namespace
}  // namespace maniple::harness::sharded_training_test
