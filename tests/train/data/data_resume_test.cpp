// Jobs that stop in the middle of an epoch and go on in new processes, with any number of ranks: every index is written
// down.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <map>
#include <optional>
#include <sstream>

#include "comm/base/format.h"
#include "harness/run_ranks.h"
#include "harness/shared_folder.h"
#include <maniple/maniple.h>

namespace maniple::harness::data_resume_test {
namespace {

constexpr int kMostRanks = 4;
constexpr std::size_t kBatch = 2;

struct Case {
  std::size_t size, workers, steps;  ///< steps before it stops; more than an epoch has: it stops after it
  bool shuffle, drop_last;
  std::string name() const {
    return format_text("size-{}.workers-{}.steps-{}.shuffle-{}.drop-{}", size, workers, steps, shuffle ? 1 : 0,
                       drop_last ? 1 : 0);
  }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::size_t size : {10, 23}) {
    for (const std::size_t workers : {0, 2}) {
      for (const std::size_t steps : {0, 1, 2, 99}) {
        if (steps == 0 && workers > 0) continue;  // workers start with the loop
        for (const bool shuffle : {false, true}) {
          for (const bool drop_last : {false, true}) all.push_back({size, workers, steps, shuffle, drop_last});
        }
      }
    }
  }
  return all;
}

/// A dataset whose samples are their own indices.
struct Numbers : torch::data::datasets::Dataset<Numbers, std::size_t> {
  explicit Numbers(std::size_t size) : size_(size) {}
  std::size_t get(std::size_t index) override { return index; }
  torch::optional<std::size_t> size() const override { return size_; }
  std::size_t size_;
};

/// A rank of a job: joins, and makes the model that all cases use.
struct Job {
  explicit Job(Rank& r) {
    init_process_group(r.world);
    torch::set_num_threads(1);
    ddp.emplace(net);
  }
  ~Job() { destroy_process_group(); }

  /// Trains from the checkpoint of `folder`, if it has one, for `steps` steps or to the end of epoch 3; returns what it
  /// trained on.
  std::vector<std::size_t> train(const Case& c, std::size_t steps, const std::string& folder, bool keep) {
    DistributedSampler sampler(c.size, {.shuffle = c.shuffle, .seed = 7, .drop_last = c.drop_last});
    auto loader = torch::data::make_data_loader(Numbers(c.size), sampler,
                                                torch::data::DataLoaderOptions().batch_size(kBatch).workers(c.workers));
    Checkpoint checkpoint({.folder = folder, .background = false});
    checkpoint.add("model", *net).add("sampler", sampler);
    if (!checkpoint.load()) sampler.set_epoch(3);
    std::vector<std::size_t> seen;
    std::size_t step = 0;
    for (std::size_t epoch = sampler.epoch(); epoch < 4 && step < steps; ++epoch) {
      sampler.set_epoch(epoch);
      for (auto& batch : sampler.counting(*loader)) {
        const std::vector<float> x(batch.begin(), batch.end());
        ddp->forward(torch::tensor(x).unsqueeze(1)).mean().backward();
        seen.insert(seen.end(), batch.begin(), batch.end());
        if (++step == steps) break;
      }
    }
    if (keep) checkpoint.save(static_cast<std::int64_t>(step));
    return seen;
  }

  torch::nn::Linear net{1, 1};
  std::optional<DistributedDataParallel<torch::nn::Linear>> ddp;
};

using Seen = std::map<std::string, std::vector<std::size_t>>;  ///< by the name of the case, of all ranks

void write_down(const std::string& file, const std::string& name, const std::vector<std::size_t>& seen) {
  std::ofstream out(file, std::ios::app);
  out << name;
  for (const std::size_t index : seen) out << ' ' << index;
  out << '\n';
}

Seen read_back(const std::string& file, int ranks) {
  Seen seen;
  for (int rank = 0; rank < ranks; ++rank) {
    std::ifstream in(file + "." + std::to_string(rank));
    EXPECT_TRUE(in.good()) << file;
    for (std::string line, name; std::getline(in, line);) {
      std::istringstream words(line);
      words >> name;
      auto& list = seen[name];
      for (std::size_t index = 0; words >> index;) list.push_back(index);
    }
  }
  return seen;
}

std::string name_of_start(int before) { return format_text("{}/start-{}", SharedFolder::here(), before); }
std::string name_of_rest(int before, int after) {
  return format_text("{}/rest-{}-{}", SharedFolder::here(), before, after);
}

void check(const Case& c, int before, int after, const std::vector<std::size_t>& first,
           const std::vector<std::size_t>& rest) {
  SCOPED_TRACE(testing::Message() << c.name() << ", " << before << " ranks, then " << after);
  const auto r1 = static_cast<std::size_t>(before), r2 = static_cast<std::size_t>(after);
  const std::size_t each = c.drop_last ? c.size / r1 : (c.size + r1 - 1) / r1;  // of a rank, in a whole epoch
  const bool was_over = c.steps * kBatch >= each;
  const std::size_t done = was_over ? c.size : c.steps * kBatch * r1;
  if (was_over) {
    EXPECT_TRUE(rest.empty());
  } else {
    EXPECT_EQ(first.size(), done);
  }
  const std::size_t uneven = was_over ? c.size % r1 : (c.size - done) % r2;
  const std::size_t filled = c.drop_last || uneven == 0 ? 0 : (was_over ? r1 : r2) - uneven;

  std::map<std::size_t, std::size_t> times;
  for (const auto* part : {&first, &rest}) {
    for (const std::size_t index : *part) ++times[index];
  }
  for (const auto& [index, n] : times) {
    EXPECT_LT(index, c.size);
    EXPECT_LE(n, filled > 0 ? 2u : 1u) << "index " << index;
  }
  EXPECT_EQ(times.size(), c.drop_last ? c.size - uneven : c.size);
  EXPECT_EQ(first.size() + rest.size(), times.size() + filled);
}

TEST(Resume, EveryNumberOfRanksAfterEveryOtherSeesEveryIndexOnce) {
  const SharedFolder shared;
  bool here = true;
  for (int before = 1; before <= kMostRanks; ++before) {
    const auto result =
        run_ranks({.n = before, .as = As::processes, .limit = Seconds(200), .env = shared.env()}, [&](Rank& r) {
          Job job(r);
          for (const Case& c : cases()) {
            const auto seen = job.train(c, c.steps, name_of_start(before) + "/" + c.name(), true);
            write_down(format_text("{}.{}", name_of_start(before), r.rank), c.name(), seen);
          }
        });
    here = here && result;
  }
  for (int after = 1; after <= kMostRanks; ++after) {
    const auto result =
        run_ranks({.n = after, .as = As::processes, .limit = Seconds(200), .env = shared.env()}, [&](Rank& r) {
          Job job(r);
          for (int before = 1; before <= kMostRanks; ++before) {
            for (const Case& c : cases()) {
              const auto seen = job.train(c, 1000, name_of_start(before) + "/" + c.name(), false);
              write_down(format_text("{}.{}", name_of_rest(before, after), r.rank), c.name(), seen);
            }
          }
        });
    here = here && result;
  }
  if (!here) return;
  for (int before = 1; before <= kMostRanks; ++before) {
    const Seen first = read_back(name_of_start(before), before);
    for (int after = 1; after <= kMostRanks; ++after) {
      const Seen rest = read_back(name_of_rest(before, after), after);
      for (const Case& c : cases()) check(c, before, after, first.at(c.name()), rest.at(c.name()));
    }
  }
}

/// Two epochs on drawn digits with dropout, momentum and workers; stops after `steps`.
std::string weights_after(std::size_t steps, const std::string& folder) {
  torch::set_num_threads(1);
  seed_all(7, static_cast<std::uint64_t>(get_rank()));
  torch::nn::Sequential net(torch::nn::Flatten(), torch::nn::Linear(784, 16), torch::nn::ReLU(),
                            torch::nn::Dropout(0.5), torch::nn::Linear(16, 10), torch::nn::LogSoftmax(1));
  DistributedDataParallel ddp(net);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  DistributedSampler sampler(101, {.seed = 7});
  auto loader = torch::data::make_data_loader(Mnist::drawn(101, 1).map(torch::data::transforms::Stack<>()), sampler,
                                              torch::data::DataLoaderOptions().batch_size(8).workers(2));
  Checkpoint checkpoint({.folder = folder});
  checkpoint.add("model", *net).add("optimizer", optimizer).add("sampler", sampler);
  auto step = static_cast<std::size_t>(checkpoint.load().value_or(0));
  for (std::size_t epoch = sampler.epoch(); epoch < 2 && step < steps; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : sampler.counting(*loader)) {
      optimizer.zero_grad();
      torch::nll_loss(ddp->forward(batch.data), batch.target).backward();
      optimizer.step();
      if (++step == steps) break;
    }
  }
  checkpoint.save(static_cast<std::int64_t>(step));
  const auto bits =
      torch::cat({net->parameters()[0].detach().flatten(), net->parameters()[2].detach().flatten()}).contiguous();
  const auto* words = static_cast<const std::uint32_t*>(bits.data_ptr());
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (std::int64_t i = 0; i < bits.numel(); ++i) hash = (hash ^ words[i]) * 0x100000001b3u;
  return format_text("{} steps, {:016x}", step, hash);
}

TEST(Resume, InTheMiddleOfAnEpochIsExactToTheLastBit) {
  const SharedFolder shared;
  const auto run = [&](std::size_t steps, const std::string& folder) {
    const auto result =
        run_ranks({.n = 2, .as = As::processes, .limit = Seconds(200), .env = shared.env()}, [&](Rank& r) {
          init_process_group(r.world);
          r.report("weights", weights_after(steps, SharedFolder::here() + folder));
          destroy_process_group();
        });
    return result.texts("weights");
  };
  const auto straight = run(1000, "/straight");
  run(3, "/parts");
  run(9, "/parts");  // in the second epoch
  const auto parts = run(1000, "/parts");
  if (straight.empty() || parts.empty()) return;
  EXPECT_EQ(straight.at(0), straight.at(1));
  EXPECT_EQ(straight, parts);
}

TEST(Resume, ACursorThatDoesNotFitNamesTheFileAndTheDifference) {
  if (is_child()) return;
  const TemporaryDirectory folder;
  {
    Checkpoint checkpoint({.folder = folder.path()});
    checkpoint.add("sampler", DistributedSampler(10, {.num_replicas = 2, .rank = 0, .seed = 3}));
    checkpoint.save(1);
  }
  const auto load = [&](DistributedSampler sampler) -> std::string {
    Checkpoint checkpoint({.folder = folder.path()});
    checkpoint.add("sampler", sampler);
    try {
      checkpoint.load();
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "loaded";
  };
  EXPECT_EQ(load(DistributedSampler(10, {.num_replicas = 3, .rank = 1, .seed = 3})), "loaded");
  const std::string other_size = load(DistributedSampler(11, {.num_replicas = 2, .rank = 0, .seed = 3}));
  EXPECT_NE(
      other_size.find(
          "sampler.safetensors: DistributedSampler: the cursor was saved with a dataset of size 10, but here it is 11"),
      std::string::npos)
      << other_size;
  const std::string other_seed = load(DistributedSampler(10, {.num_replicas = 2, .rank = 0, .seed = 4}));
  EXPECT_NE(other_seed.find("saved with seed 3, but here it is 4"), std::string::npos) << other_seed;
}

}  // namespace
}  // namespace maniple::harness::data_resume_test
