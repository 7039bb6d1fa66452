// Checkpoints of training runs: a run that was interrupted ends with the same bits as one that was not.
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

#include <gtest/gtest.h>

#include "harness/run_ranks.h"
#include "harness/shared_folder.h"
#include "harness/temporary_directory.h"
#include "train/checkpoint/checkpoint_folder.h"
#include <maniple/dist.h>
#include <maniple/train/checkpoint.h>

namespace maniple::harness::checkpoint_test {
namespace {

struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::int64_t width = 8) {
    first = register_module("first", torch::nn::Linear(4, width));
    norm = register_module("norm", torch::nn::BatchNorm1d(width));
    drop = register_module("drop", torch::nn::Dropout(0.3));
    last = register_module("last", torch::nn::Linear(width, 2));
  }
  torch::Tensor forward(torch::Tensor x) { return last(drop(torch::relu(norm(first(x))))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(Net);

using Parameters = std::vector<torch::Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(Parameters)>;

template <class T, class Options>
MakeOptimizer make(Options options) {
  return [options](Parameters parameters) { return std::make_unique<T>(std::move(parameters), options); };
}

const std::vector<std::pair<std::string, MakeOptimizer>>& optimizers() {
  namespace o = torch::optim;
  static const std::vector<std::pair<std::string, MakeOptimizer>> all = {
      {"SGD", make<o::SGD>(o::SGDOptions(0.1))},
      {"SGD with momentum", make<o::SGD>(o::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01))},
      {"Adam", make<o::Adam>(o::AdamOptions(0.01))},
      {"Adam with amsgrad", make<o::Adam>(o::AdamOptions(0.01).amsgrad(true).betas({0.8, 0.95}))},
      {"AdamW", make<o::AdamW>(o::AdamWOptions(0.01))},
      {"RMSprop", make<o::RMSprop>(o::RMSpropOptions(0.01))},
      {"RMSprop centered", make<o::RMSprop>(o::RMSpropOptions(0.01).momentum(0.5).centered(true))},
      {"Adagrad", make<o::Adagrad>(o::AdagradOptions(0.05).lr_decay(0.1))},
  };
  return all;
}

/// A run: everything that a program would have, made anew as a new process would.
struct Job {
  Job(const std::string& folder, const MakeOptimizer& make_optimizer, CheckpointOptions options = {.folder = ""}) {
    net = Net();
    optimizer = make_optimizer(net->parameters());
    scheduler = std::make_unique<torch::optim::StepLR>(*optimizer, 3, 0.5);
    options.folder = folder;
    checkpoint = std::make_unique<Checkpoint>(std::move(options));
    checkpoint->add("model", *net).add("optimizer", *optimizer).add("scheduler", *scheduler).add("loss", loss);
  }
  void train(int steps) {
    for (int i = 0; i < steps; ++i) {
      // The data is random too: it goes on where it stopped.
      const auto x = torch::randn({16, 4});
      optimizer->zero_grad();
      auto value = (net(x) - x.slice(1, 0, 2)).pow(2).mean();
      value.backward();
      optimizer->step();
      scheduler->step();
      loss = value.item<double>();
    }
  }
  std::vector<torch::Tensor> bits() const {
    std::vector<torch::Tensor> all = net->parameters();
    for (const auto& buffer : net->buffers()) all.push_back(buffer);
    return all;
  }
  double loss = 0;
  Net net{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<torch::optim::LRScheduler> scheduler;
  std::unique_ptr<Checkpoint> checkpoint;
};

void expect_same(const Job& a, const Job& b, const std::string& what) {
  const auto x = a.bits();
  const auto y = b.bits();
  ASSERT_EQ(x.size(), y.size());
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(x[i].equal(y[i])) << what << ", tensor " << i;
  EXPECT_EQ(a.loss, b.loss) << what;
}

TEST(Checkpoint, AnInterruptedRunEndsWithTheSameBits) {
  for (const auto& [name, make_optimizer] : optimizers()) {
    const TemporaryDirectory folder;
    torch::manual_seed(1);
    Job straight(folder.path() + "/none", make_optimizer);
    straight.train(10);

    torch::manual_seed(1);
    auto before = std::make_unique<Job>(folder.path(), make_optimizer);
    before->train(5);
    before->checkpoint->save(5);
    before.reset();
    torch::manual_seed(99);
    Job after(folder.path(), make_optimizer);
    EXPECT_EQ(after.checkpoint->load(), std::optional<std::int64_t>(5)) << name;
    after.train(5);
    expect_same(straight, after, name);
  }
}

TEST(Checkpoint, WithoutACheckpointNothingIsChanged) {
  const TemporaryDirectory folder;
  Job run(folder.path() + "/not/there", optimizers()[0].second);
  const auto before = run.bits()[0].clone();
  EXPECT_EQ(run.checkpoint->load(), std::nullopt);
  EXPECT_TRUE(run.bits()[0].equal(before));
}

TEST(Checkpoint, BackgroundSavesWriteTheStateAtTheCall) {
  const TemporaryDirectory folder;
  Job run(folder.path(), optimizers()[2].second);
  run.train(1);
  const auto then = run.bits()[0].clone();
  run.checkpoint->save(1);
  run.train(3);
  run.checkpoint->wait();
  EXPECT_EQ(run.checkpoint->last_error(), "");
  EXPECT_FALSE(run.bits()[0].equal(then));
  EXPECT_EQ(run.checkpoint->load(), std::optional<std::int64_t>(1));
  EXPECT_TRUE(run.bits()[0].equal(then));
}

TEST(Checkpoint, TheLastFewAreKept) {
  const TemporaryDirectory folder;
  Job run(folder.path(), optimizers()[0].second, {.folder = "", .keep_last = 2, .background = false});
  for (int step = 1; step <= 5; ++step) run.checkpoint->save(step);
  EXPECT_EQ(list_checkpoints(folder.path()), (std::vector<std::int64_t>{5, 4}));
  run.checkpoint->save(5);  // again: replaced
  EXPECT_EQ(list_checkpoints(folder.path()), (std::vector<std::int64_t>{5, 4}));
  EXPECT_EQ(run.checkpoint->load({.step = 4}), std::optional<std::int64_t>(4));
}

TEST(Checkpoint, DamageIsNamedAndTheOneBeforeIsUsed) {
  const auto damage = [](const std::string& path, const std::string& how) {
    if (how == "missing") {
      EXPECT_EQ(::unlink(path.c_str()), 0);
    } else if (how == "truncated") {
      EXPECT_EQ(::truncate(path.c_str(), 100), 0);
    } else {
      std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
      file.seekg(-3, std::ios::end);
      const char byte = static_cast<char>(file.get());
      file.seekp(-3, std::ios::end);
      file.put(static_cast<char>(byte ^ 4));
    }
  };
  for (const std::string how : {"missing", "truncated", "one bit"}) {
    for (const std::string file : {"model.safetensors", "optimizer.safetensors", "manifest.json"}) {
      const TemporaryDirectory folder;
      Job run(folder.path(), optimizers()[2].second, {.folder = "", .keep_last = 3, .background = false});
      run.train(1);
      run.checkpoint->save(1);
      run.train(1);
      run.checkpoint->save(2);
      damage(folder.path() + "/" + checkpoint_name(2) + "/" + file, how);
      testing::internal::CaptureStderr();
      EXPECT_EQ(run.checkpoint->load(), std::optional<std::int64_t>(1)) << how << " " << file;
      const std::string log = testing::internal::GetCapturedStderr();
      EXPECT_NE(log.find(checkpoint_name(2) + "/" + file), std::string::npos) << how << ": " << log;
      damage(folder.path() + "/" + checkpoint_name(1) + "/" + file, how);
      try {
        run.checkpoint->load();
        ADD_FAILURE() << "loaded";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("no checkpoint in"), std::string::npos) << error.what();
      }
    }
  }
}

TEST(Checkpoint, AFullDiskLeavesThePreviousOne) {  // fault 20; the limit of a file's size stands for the disk's
  const TemporaryDirectory folder;
  Job run(folder.path(), optimizers()[2].second, {.folder = "", .keep_last = 1, .background = false});
  run.train(1);
  run.checkpoint->save(1);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  rlimit small = before;
  small.rlim_cur = 600;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &small);
  run.train(1);
  testing::internal::CaptureStderr();
  EXPECT_NO_THROW(run.checkpoint->save(2));
  ::setrlimit(RLIMIT_FSIZE, &before);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("training goes on, the newest one is still from step 1"), std::string::npos) << log;
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(run.checkpoint->last_error().find("step 2"), std::string::npos) << run.checkpoint->last_error();
  EXPECT_EQ(list_checkpoints(folder.path()), (std::vector<std::int64_t>{1}));
  EXPECT_EQ(::system(("test $(ls -A " + folder.path() + " | wc -l) -eq 1").c_str()), 0)
      << "nothing is left of the failed one";
  run.checkpoint->save(3);
  EXPECT_EQ(run.checkpoint->last_error(), "");
  EXPECT_EQ(run.checkpoint->load(), std::optional<std::int64_t>(3));
}

TEST(Checkpoint, WhatDoesNotFitIsNamedAndChangesNothing) {
  const TemporaryDirectory folder;
  {
    Job run(folder.path(), optimizers()[2].second);
    run.train(1);
    run.checkpoint->save(1);
  }
  const auto trouble = [&](auto add) -> std::string {
    Checkpoint checkpoint({.folder = folder.path()});
    add(checkpoint);
    try {
      checkpoint.load();
    } catch (const Error& error) {
      return error.what();
    }
    return "loaded";
  };
  Net wide(16);
  const auto before = wide->parameters()[0].clone();
  EXPECT_NE(trouble([&](Checkpoint& c) {
              c.add("model", *wide);
            }).find("first.bias has shape [8] in the checkpoint and [16] here"),
            std::string::npos);
  EXPECT_TRUE(wide->parameters()[0].equal(before));
  torch::nn::Linear other(4, 8);
  EXPECT_NE(trouble([&](Checkpoint& c) { c.add("model", *other); }).find("not in the checkpoint: [bias, weight]"),
            std::string::npos);
  Net net;
  torch::optim::SGD sgd(net->parameters(), 0.1);
  EXPECT_NE(trouble([&](Checkpoint& c) { c.add("optimizer", sgd); }).find("optimizer is Adam, this one SGD"),
            std::string::npos);
  torch::optim::Adam few(std::vector<torch::Tensor>{net->parameters()[0]}, 0.1);
  EXPECT_NE(trouble([&](Checkpoint& c) { c.add("optimizer", few); }).find("parameters, here 1"), std::string::npos);
  std::int64_t number = 0;
  EXPECT_NE(trouble([&](Checkpoint& c) { c.add("absent", number); }).find("absent.safetensors"), std::string::npos);
  Checkpoint checkpoint({.folder = folder.path()});
  EXPECT_THROW(checkpoint.add("../x", number), InvalidArgument);
  EXPECT_THROW(checkpoint.add("a", number).add("a", number), InvalidArgument);
  EXPECT_THROW(checkpoint.save(-1), InvalidArgument);
  EXPECT_THROW(Checkpoint({.folder = ""}), InvalidArgument);
  EXPECT_THROW(Checkpoint({.folder = "x", .keep_last = 0}), InvalidArgument);
}

TEST(Checkpoint, AnotherNumberOfRanksGoesOn) {
  const SharedFolder shared;
  const auto drawn = [] { return torch::rand({1}).item<float>(); };
  const auto saved = run_ranks({.n = 2, .as = As::processes, .env = shared.env()}, [&](Rank& r) {
    init_process_group(r.world);
    torch::manual_seed(static_cast<std::uint64_t>(100 + r.rank));
    torch::Tensor weights = torch::full({3}, 7.0);
    std::int64_t epoch = 4;
    {
      Checkpoint checkpoint({.folder = SharedFolder::here()});
      checkpoint.add("weights", weights).add("epoch", epoch);
      checkpoint.save(12);
    }
    r.report("drawn", drawn());
    r.world->barrier();
    destroy_process_group();
  });
  const auto loaded = run_ranks({.n = 3, .as = As::processes, .env = shared.env()}, [&](Rank& r) {
    init_process_group(r.world);
    torch::Tensor weights = torch::zeros({3});
    std::int64_t epoch = 0;
    Checkpoint checkpoint({.folder = SharedFolder::here()});
    checkpoint.add("weights", weights).add("epoch", epoch);
    EXPECT_EQ(checkpoint.load(), std::optional<std::int64_t>(12));
    EXPECT_TRUE(weights.equal(torch::full({3}, 7.0)));
    EXPECT_EQ(epoch, 4);
    r.report("drawn", drawn());
    r.world->barrier();
    destroy_process_group();
  });
  if (!saved || !loaded) return;
  const auto before = saved.texts("drawn");
  const auto after = loaded.texts("drawn");
  for (const int rank : {0, 1}) EXPECT_EQ(before.at(rank), after.at(rank)) << "rank " << rank;
  EXPECT_NE(before.at(0), before.at(1));
}

TEST(Checkpoint, AFailureOnOneRankIsAnErrorOnAll) {
  const SharedFolder shared;
  run_ranks({.n = 2, .as = As::processes, .env = shared.env()}, [&](Rank& r) {
    init_process_group(r.world);
    std::int64_t number = 1;
    torch::Tensor tensor = torch::ones({2});
    {
      Checkpoint checkpoint({.folder = SharedFolder::here()});
      checkpoint.add("part", number).save(1);
    }
    r.world->barrier();
    Checkpoint checkpoint({.folder = SharedFolder::here()});
    r.rank == 1 ? checkpoint.add("part", tensor) : checkpoint.add("part", number);  // rank 1 expects a tensor
    try {
      checkpoint.load();
      ADD_FAILURE() << "loaded on rank " << r.rank;
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find(r.rank == 1 ? "holds no value" : "rank 1 could not load"), std::string::npos) << text;
    }
    destroy_process_group();
  });
}

// All parts of one rank, for every kind of optimizer; the ranks then go on with the same bits.
TEST(Checkpoint, AllRanksGetTheStateOfOneInMemory) {
  run_ranks({.n = 3, .as = As::processes}, [](Rank& r) {
    init_process_group(r.world);
    for (const auto& [name, make_optimizer] : optimizers()) {
      torch::manual_seed(static_cast<std::uint64_t>(r.rank));
      Job job("", make_optimizer, {.in_memory = true});
      job.train(2 * r.rank);  // rank 0's optimizer has no state
      job.checkpoint->copy_from(1);
      torch::manual_seed(9);
      job.train(4);
      for (const torch::Tensor& own : job.bits()) {
        const torch::Tensor theirs = own.detach().clone();
        broadcast(theirs, 1);
        EXPECT_TRUE(own.equal(theirs)) << name << ", rank " << r.rank;
      }
      EXPECT_EQ(r.world->broadcast_object(std::to_string(job.loss), 1), std::to_string(job.loss)) << name;
    }
    destroy_process_group();
  });
}

std::string copy_error(Checkpoint& checkpoint, int source) {
  try {
    checkpoint.copy_from(source);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Checkpoint, PartsThatDoNotFitOnOneRankAreAnErrorOnAll) {
  run_ranks({.n = 3}, [](Rank& r) {
    torch::nn::Linear net(r.rank == 1 ? 4 : 3, 2);
    const torch::Tensor before = net->weight.detach().clone();
    std::int64_t epoch = r.rank;
    Checkpoint checkpoint({.in_memory = true, .group = r.world});
    checkpoint.add("net", *net).add("epoch", epoch);
    const std::string unfit = copy_error(checkpoint, 0);
    EXPECT_NE(unfit.find(r.rank == 1 ? "weight" : "rank 1 could not take over the parts of rank 0"), std::string::npos)
        << unfit;
    EXPECT_TRUE(r.rank != 1 || net->weight.equal(before));

    Checkpoint other({.in_memory = true, .group = r.world});
    other.add(r.rank == 2 ? "other" : "epoch", epoch);
    const std::string named = copy_error(other, 0);
    EXPECT_NE(named.find(r.rank == 2 ? "rank 0 copies the parts epoch, and this rank has other"
                                     : "rank 2 could not copy the parts"),
              std::string::npos)
        << named;
    EXPECT_THROW(checkpoint.save(1), InvalidArgument);
    EXPECT_THROW(checkpoint.load(), InvalidArgument);

    // What the source cannot copy.
    torch::Tensor undefined;
    Checkpoint third({.in_memory = true, .group = r.world});
    third.add("undefined", undefined);
    EXPECT_NE(copy_error(third, 2), "no error");
  });
}

}  // namespace
}  // namespace maniple::harness::checkpoint_test
