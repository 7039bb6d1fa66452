// Training over virtual ranks: the same weights and the same log, bit for bit, on every number of ranks.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <limits>
#include <regex>
#include <string>
#include <vector>

#include "comm/base/format.h"
#include "harness/error_of.h"
#include "harness/run_ranks.h"
#include "harness/shared_folder.h"
#include "train/models.h"
#include "train/sha256.h"
#include <maniple/dist.h>
#include <maniple/train/amp.h>
#include <maniple/train/data_loader.h>
#include <maniple/train/lr_scheduler.h>
#include <maniple/train/optim.h>
#include <maniple/train/trainer.h>

namespace maniple::harness::virtual_ranks_test {
namespace {

using testing_models::numbers;
using Example = torch::data::Example<>;

constexpr std::size_t kSamples = 75, kJudged = 21, kBatch = 2;

/// Images with noise of their own in every epoch, as augmentations are.
struct Images {
  Example get(std::size_t index, SampleRandom& random) const {
    const auto noise = static_cast<float>(random.unit());
    return {numbers({1, 8, 8}, static_cast<int>(index)) + noise,
            torch::tensor(static_cast<std::int64_t>(index % 4), torch::kLong)};
  }
  std::size_t size() const { return count; }
  std::size_t count = kSamples;
};

/// A convolutional network with batch norm, dropout and a layer that only some batches use.
struct ConvImpl : torch::nn::Module {
  ConvImpl() {
    testing_models::fill(*this, 1);
    norm->reset_parameters();
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(norm->forward(conv->forward(x))).flatten(1);
    x = torch::dropout(x, 0.3, is_training());
    if (rare && x.sum().item<float>() > 30) x = x + rare->forward(x);
    return fc->forward(x) + empty.sum().to(torch::kFloat32);
  }
  torch::Tensor empty = register_parameter("empty", torch::zeros({0}, torch::kFloat64));  // fills a bucket alone
  torch::nn::Conv2d conv = register_module("conv", torch::nn::Conv2d(1, 24, 3));
  torch::nn::BatchNorm2d norm = register_module("norm", torch::nn::BatchNorm2d(24));
  torch::nn::Linear fc = register_module("fc", torch::nn::Linear(24 * 36, 4));
  torch::nn::Linear rare{nullptr};
};
TORCH_MODULE(Conv);

/// Rows of an image are a sequence.
struct TransformerImpl : torch::nn::Module {
  TransformerImpl() { testing_models::fill(*this, 3); }
  torch::Tensor forward(const torch::Tensor& x) {
    return head->forward(layer->forward(x.squeeze(1).transpose(0, 1)).mean(0));
  }
  torch::nn::TransformerEncoderLayer layer = register_module(
      "layer", torch::nn::TransformerEncoderLayer(torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(64)));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(8, 4));
};
TORCH_MODULE(Transformer);

struct Job {
  int total = 8;
  std::string model = "conv";
  bool bfloat16 = false;
  bool overflows = false;       // in step 2, some batches have infinite gradients
  std::string folder = {};      // of checkpoints
  std::int64_t stop_after = 0;  // 0: never
  Overlap overlap = Overlap::automatic;
  double bucket_mb = 25;
};

std::string hash_of(const torch::nn::Module& module) {
  Sha256 hash;
  for (const auto& tensors : {module.parameters(), module.buffers()}) {
    for (const torch::Tensor& tensor : tensors) {
      const torch::Tensor bytes = tensor.detach().contiguous();
      hash.add(bytes.data_ptr(), bytes.nbytes());
    }
  }
  return hash.take();
}

/// The log without times.
std::string log_of(const std::string& folder) {
  std::ifstream file(folder + "/log.jsonl");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  return std::regex_replace(text, std::regex("\"seconds\":[^,]*,"), "");
}

template <class Net>
std::string trained(Rank& r, const Job& job, Net net, TrainerOptions options) {
  optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  LrScheduler scheduler(optimizer, lr::one_cycle({.max_lr = 0.05, .steps = 12}));
  options.schedule = [&] { scheduler.step(); };
  options.log_dir = format_text("{}/log{}", r.dir(), r.rank);
  Trainer trainer(net, optimizer, options);
  trainer.add("scheduler", scheduler);
  DataLoader train(Images{}, {.batch_size = kBatch, .workers = 1, .seed = 5});
  DataLoader judged(Images{kJudged}, {.batch_size = kBatch, .seed = 9, .mode = SamplerMode::evaluation});
  trainer.fit(train, judged, [&](auto& batch, Metrics& metrics) {
    const torch::Tensor output = net->forward(batch.data).to(torch::kFloat32);
    metrics.add_accuracy("accuracy", output, batch.target);
    metrics.add_max("largest", output.max());
    const auto loss = torch::nn::functional::cross_entropy(output, batch.target);
    const bool overflows = job.overflows && trainer.state().step == 2 && batch.target[0].template item<int>() == 0;
    return overflows ? loss * std::numeric_limits<float>::infinity() : loss;
  });
  return format_text("step {} samples {} weights {}\n{}", trainer.state().step, trainer.state().samples, hash_of(*net),
                     r.rank == 0 ? log_of(options.log_dir) : "");
}

std::string train(Rank& r, const Job& job) {
  if (r.world) init_process_group(r.world);
  torch::manual_seed(r.rank == 0 ? 77 : 1000 + r.rank);  // rank 0's counts
  TrainerOptions options{.epochs = 2, .max_grad_norm = 1, .log_every = 2, .progress = false};
  options.max_steps = job.stop_after;
  options.virtual_ranks = job.total;
  options.checkpoint.folder = job.folder;
  if (job.overflows) options.nonfinite_gradients = NonfiniteGradients::skip;
  options.strategy = strategy::DataParallel{
      .ddp = {.bucket_cap_mb = job.bucket_mb, .find_unused_parameters = job.model == "rare", .overlap = job.overlap}};
  if (job.bfloat16) options.autocast = [] { return std::make_shared<Autocast>(torch::kCPU); };
  std::string text;
  if (job.model == "transformer") {
    text = trained(r, job, Transformer(), options);
  } else {
    Conv net;
    if (job.model == "rare") {
      net->rare = net->register_module("rare", torch::nn::Linear(24 * 36, 24 * 36));
      testing_models::fill(*net->rare, 7);
    }
    text = trained(r, job, net, options);
  }
  if (r.world) destroy_process_group();
  return text;
}

/// What every rank reports; empty if this process does not see the result.
std::string of_run(RunOptions run, const Job& job) {
  run.as = As::processes;
  run.limit = std::chrono::seconds(300);
  run.timeout = std::chrono::seconds(120);
  const auto result = run_ranks(run, [&](Rank& r) {
    const std::string text = train(r, job);
    r.report("weights", text.substr(0, text.find('\n')));
    if (r.rank == 0) r.report("log", text);
  });
  if (!result) return {};
  const auto weights = result.texts("weights");
  EXPECT_EQ(weights.size(), static_cast<std::size_t>(run.n));
  for (const auto& [rank, text] : weights) EXPECT_EQ(text, weights.at(0)) << "rank " << rank;
  return result.texts("log")[0];
}

/// The same job on these numbers of ranks ends alike.
void expect_equal_on(const std::vector<int>& ranks, const Job& job,
                     const std::vector<TransportKind>& transports = {TransportKind::automatic}) {
  std::string first;
  for (const int n : ranks) {
    for (const TransportKind transport : transports) {
      const std::string text = of_run({.n = n, .transport = transport}, job);
      if (is_child()) continue;
      EXPECT_NE(text.find("\"kind\":\"evaluation\""), std::string::npos) << text;
      EXPECT_NE(text.find("grad_norm"), std::string::npos) << text;
      if (first.empty()) first = text;
      EXPECT_EQ(text, first) << n << " ranks";
    }
  }
}

TEST(VirtualRanks, AConvolutionalNetworkHasTheSameBitsOnAnyNumberOfRanks) { expect_equal_on({1, 2, 3, 4, 5, 8}, {}); }
TEST(VirtualRanks, ATransformerOverSharedMemoryAndTcp) {
  expect_equal_on({1, 2, 3, 4}, {.model = "transformer"}, {TransportKind::shm, TransportKind::tcp});
}
TEST(VirtualRanks, SevenVirtualRanksInSmallBucketsWithOverlap) {
  expect_equal_on({1, 2, 4, 7}, {.total = 7, .overlap = Overlap::thread, .bucket_mb = 0.01});
}
TEST(VirtualRanks, ParametersThatOnlySomeBatchesUse) { expect_equal_on({1, 2, 3}, {.model = "rare"}); }
TEST(VirtualRanks, Bfloat16Autocast) { expect_equal_on({1, 2, 3}, {.total = 4, .bfloat16 = true}); }

TEST(VirtualRanks, ASkippedStep) { expect_equal_on({1, 2, 5}, {.total = 5, .overflows = true}); }

TEST(VirtualRanks, AProcessWithoutAGroup) {
  for (const std::string model : {"conv", "rare"}) {
    const std::string with = of_run({.n = 1}, {.model = model});
    const std::string without = of_run({.n = 1, .init = false}, {.model = model});
    EXPECT_EQ(with, without) << model;
  }
}

TEST(VirtualRanks, ACheckpointContinuesOnAnotherNumberOfRanks) {
  const SharedFolder shared;
  const auto here = [&](int i) { return format_text("{}/{}", SharedFolder::here(), i); };
  const auto weights_of = [](const std::string& text) { return text.substr(0, text.find('\n')); };
  const std::string straight = of_run({.n = 2}, {});
  for (const auto& [first, second] : {std::pair{4, 2}, std::pair{1, 5}}) {
    of_run({.n = first, .env = shared.env()}, {.folder = here(first), .stop_after = 3});
    const std::string rest = of_run({.n = second, .env = shared.env()}, {.folder = here(first)});
    EXPECT_EQ(weights_of(rest), weights_of(straight)) << first << " to " << second;
    if (is_child()) continue;
    // The last row is the row of the straight run.
    const std::string last_row = straight.substr(straight.rfind("{\"kind\""));
    EXPECT_NE(rest.find(last_row), std::string::npos) << rest << "\nlacks\n" << last_row;
  }
}

// ---- Refusals -------------------------------------------------------------------------------------------------------

TrainerOptions options_of(int virtual_ranks, Strategy strategy = strategy::DataParallel{}) {
  TrainerOptions options{.graceful_stop = false, .progress = false, .strategy = std::move(strategy)};
  options.virtual_ranks = virtual_ranks;
  return options;
}

void expect_refused(const TrainerOptions& options, const std::string& expected) {
  testing_models::Net net;
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const std::string text = error_of([&] { Trainer trainer(net, optimizer, options); });
  EXPECT_NE(text.find(expected), std::string::npos) << text << "\nlacks: " << expected;
}

TEST(VirtualRanks, RefusesWhatWouldBreakThePromise) {
  run_ranks({.n = 3, .as = As::processes}, [](Rank& r) {
    init_process_group(r.world);
    expect_refused(options_of(2), "3 ranks for 2 virtual ranks");
    expect_refused(options_of(-1), "virtual_ranks is -1");
    expect_refused(options_of(8, strategy::Zero1{}), "virtual_ranks needs strategy DataParallel");
    expect_refused(options_of(8, strategy::FullySharded{}), "virtual_ranks needs strategy DataParallel");
    expect_refused(options_of(8, strategy::DataParallel{.ddp = {.static_graph = true}}), "static_graph");
    expect_refused(options_of(8, strategy::DataParallel{.ddp = {.average = Average::samples}}), "Average::samples");
    TrainerOptions accumulates = options_of(8);
    accumulates.accumulate = 2;
    expect_refused(accumulates, "virtual_ranks accumulates by itself");
    TrainerOptions no_threads = options_of(8);
    no_threads.virtual_threads = 0;
    expect_refused(no_threads, "virtual_threads is 0");

    TrainerOptions differs = options_of(r.rank == 2 ? 8 : 6);
    differs.allow_different_bits = true;
    expect_refused(differs,
                   "rank 0 was given virtual_ranks 6, virtual_threads 1, allow_different_bits 1, and rank 2 "
                   "virtual_ranks 8");

    testing_models::Net net;
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    Trainer trainer(net, optimizer, options_of(8));
    const auto loss = [&](auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); };
    std::vector<Example> range{{numbers({2, 8}), numbers({2, 4})}};
    EXPECT_NE(error_of([&] { trainer.fit(range, loss); }).find("needs data that can be divided"), std::string::npos);
    EXPECT_NE(error_of([&] {
                trainer.ddp()->register_comm_hook([](GradBucket&, CommContext&) { return Work(); });
              }).find("cannot be combined with virtual_ranks"),
              std::string::npos);
    r.world->barrier();  // the next error aborts the group
    EXPECT_NE(error_of([&] { net->forward(numbers({2, 8})).sum().backward(); }).find("a backward outside Trainer::fit"),
              std::string::npos);
    destroy_process_group();
  });
}

TEST(VirtualRanks, RefusesRanksThatAreThreads) {
  run_ranks({.n = 2}, [](Rank& r) {
    expect_refused(options_of(4, strategy::DataParallel{.ddp = {.group = r.world}}),
                   "ranks 0 and 1 are threads of one process");
  });
}

/// Samples for Net.
struct Rows {
  Example get(std::size_t index) const {
    return {numbers({8}, static_cast<int>(index)), numbers({4}, static_cast<int>(index) + 50)};
  }
  std::size_t size() const { return 32; }
};

TEST(VirtualRanks, ARankThatComputesOtherBitsIsNamed) {
  for (const bool allowed : {false, true}) {
    run_ranks({.n = 3, .as = As::processes}, [&](Rank& r) {
      init_process_group(r.world);
      testing_models::Net net;
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      TrainerOptions options = options_of(6);
      options.allow_different_bits = allowed;
      Trainer trainer(net, optimizer, options);
      DataLoader loader(Rows{}, {.batch_size = 2});
      const double factor = r.rank == 1 ? 1.0000001 : 1;  // another bit
      const std::string text = error_of([&] {
        trainer.fit(loader,
                    [&](auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target) * factor; });
      });
      if (allowed) {
        EXPECT_EQ(text, "no error");
        EXPECT_EQ(trainer.state().step, 3);
      } else {
        EXPECT_NE(text.find("ranks 0 and 1 computed different gradients"), std::string::npos) << text;
        EXPECT_EQ(trainer.state().step, 0);
        const std::string again = error_of([&] {
          trainer.fit(loader,
                      [&](auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target) * factor; });
        });
        EXPECT_EQ(again, text) << "a refusal is not forgotten";
      }
      destroy_process_group();
    });
  }
}

TEST(VirtualRanks, ALossThatThrowsWhileTheBitsAreVerifiedLeavesTheBuffers) {
  run_ranks({.n = 2, .as = As::processes}, [](Rank& r) {
    init_process_group(r.world);
    torch::nn::BatchNorm1d norm(8);
    torch::nn::Sequential net(norm, torch::nn::Linear(8, 4));
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    Trainer trainer(net, optimizer, options_of(4));
    DataLoader loader(Rows{}, {.batch_size = 2});
    bool throws = true;
    const auto loss = [&](auto& batch) {
      const torch::Tensor value = torch::mse_loss(net->forward(batch.data), batch.target);
      if (throws) throw InvalidArgument("no loss today");
      return value;
    };
    const torch::Tensor mean = norm->running_mean.clone();
    EXPECT_NE(error_of([&] { trainer.fit(loader, loss); }).find("no loss today"), std::string::npos);
    EXPECT_TRUE(torch::equal(norm->running_mean, mean));
    throws = false;
    EXPECT_EQ(error_of([&] { trainer.fit(loader, loss); }), "no error");
    EXPECT_FALSE(torch::equal(norm->running_mean, mean));
    destroy_process_group();
  });
}

TEST(VirtualRanks, ACheckpointOfAnotherJobIsRefused) {
  run_ranks({.n = 2, .as = As::processes}, [](Rank& r) {
    init_process_group(r.world);
    const auto fit = [&](int virtual_ranks, int threads, bool allowed) {
      testing_models::Net net;
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      TrainerOptions options = options_of(virtual_ranks);
      options.checkpoint.folder = r.dir() + "/checkpoints";
      options.virtual_threads = threads;
      options.allow_different_bits = allowed;
      options.epochs = 2;
      options.max_steps = threads == 1 && virtual_ranks == 4 ? 2 : 0;
      Trainer trainer(net, optimizer, options);
      DataLoader loader(Rows{}, {.batch_size = 2});
      return error_of([&] {
        trainer.fit(loader, [&](auto& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); });
      });
    };
    EXPECT_EQ(fit(4, 1, false), "no error");
    EXPECT_NE(fit(8, 1, false).find("virtual_ranks 4, and here it is 8"), std::string::npos);
    EXPECT_NE(fit(4, 2, false).find("virtual_threads 1, and here it is 2"), std::string::npos);
    EXPECT_EQ(fit(4, 2, true), "no error");
    destroy_process_group();
  });
}

}  // namespace
}  // namespace maniple::harness::virtual_ranks_test
