// The sampler against its promises, over many sizes and numbers of ranks.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "harness/error_of.h"
#include "train/data/split_mix.h"
#include <maniple/comm/error.h>
#include <maniple/train/sampler.h>

namespace maniple::data_sampler_test {
namespace {

using Indices = std::vector<std::size_t>;

constexpr int kRanks[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16};
constexpr std::size_t kSizes[] = {0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 63, 64, 65, 100, 143, 144, 145, 1000, 1009};

DistributedSampler sampler_of(std::size_t size, int ranks, int rank, SamplerOptions options = {}) {
  options.num_replicas = ranks;
  options.rank = rank;
  return DistributedSampler(size, options);
}

/// A whole pass, as a loader would make it.
Indices drawn_from(DistributedSampler& sampler, std::size_t batch_size) {
  Indices all;
  while (auto batch = sampler.next(batch_size)) {
    EXPECT_GT(batch->size(), 0u);
    EXPECT_LE(batch->size(), batch_size);
    all.insert(all.end(), batch->begin(), batch->end());
  }
  return all;
}

Indices pass(DistributedSampler& sampler, std::size_t batch_size = 7) {
  sampler.reset();
  return drawn_from(sampler, batch_size);
}

template <class Check>
void for_all(Check check) {
  for (const std::size_t size : kSizes) {
    for (const int ranks : kRanks) {
      for (const bool shuffle : {false, true}) {
        SCOPED_TRACE(testing::Message() << size << " samples, " << ranks << " ranks, "
                                        << (shuffle ? "shuffled" : "in order"));
        check(size, ranks, shuffle);
      }
    }
  }
}

TEST(Sampler, TrainingIsCompleteAndEqualAndRepeatsOnlyTheFirst) {
  for_all([](std::size_t size, int ranks, bool shuffle) {
    const std::size_t whole = (size + static_cast<std::size_t>(ranks) - 1) / static_cast<std::size_t>(ranks);
    std::map<std::size_t, int> seen;
    std::vector<Indices> parts;
    for (int rank = 0; rank < ranks; ++rank) {
      auto sampler = sampler_of(size, ranks, rank, {.shuffle = shuffle, .seed = 3});
      parts.push_back(pass(sampler));
      EXPECT_EQ(parts.back().size(), whole);
      EXPECT_EQ(sampler.local_size(), whole);
      EXPECT_EQ(parts.back(), sampler.indices());
      for (const std::size_t index : parts.back()) ++seen[index];
    }
    EXPECT_EQ(seen.size(), size);
    // Interleaved, the parts are the one order, continued from its front.
    Indices order;
    for (std::size_t i = 0; i < whole; ++i) {
      for (const Indices& part : parts) order.push_back(part[i]);
    }
    for (std::size_t i = size; i < order.size(); ++i) EXPECT_EQ(order[i], order[i % size]);
    for (const auto& [index, times] : seen) {
      EXPECT_LT(index, size);
      EXPECT_LE(times, size >= static_cast<std::size_t>(ranks) ? 2 : ranks);
    }
  });
}

TEST(Sampler, DropLastIsDisjointAndEqual) {
  for_all([](std::size_t size, int ranks, bool shuffle) {
    std::set<std::size_t> seen;
    const std::size_t each = size / static_cast<std::size_t>(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      auto sampler = sampler_of(size, ranks, rank, {.shuffle = shuffle, .drop_last = true});
      const Indices part = pass(sampler);
      EXPECT_EQ(part.size(), each);
      for (const std::size_t index : part) EXPECT_TRUE(index < size && seen.insert(index).second) << index;
    }
    EXPECT_EQ(seen.size(), each * static_cast<std::size_t>(ranks));
  });
}

TEST(Sampler, EvaluationIsExact) {
  for_all([](std::size_t size, int ranks, bool shuffle) {
    std::set<std::size_t> seen;
    std::size_t least = size;
    std::size_t most = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      auto sampler = sampler_of(size, ranks, rank, {.shuffle = shuffle, .mode = SamplerMode::evaluation});
      const Indices part = pass(sampler);
      EXPECT_EQ(part.size(), sampler.local_size());
      for (const std::size_t index : part) EXPECT_TRUE(index < size && seen.insert(index).second) << index;
      least = std::min(least, part.size());
      most = std::max(most, part.size());
    }
    EXPECT_EQ(seen.size(), size);
    EXPECT_LE(most - least, size == 0 ? 0u : 1u);
  });
}

TEST(Sampler, WithoutShuffleRankRTakesEveryRthPlace) {
  auto sampler = sampler_of(10, 4, 1, {.shuffle = false});
  EXPECT_EQ(pass(sampler), (Indices{1, 5, 9}));
  sampler = sampler_of(10, 4, 3, {.shuffle = false});
  EXPECT_EQ(pass(sampler), (Indices{3, 7, 1}));
  sampler = sampler_of(2, 5, 4, {.shuffle = false});
  EXPECT_EQ(pass(sampler), (Indices{0}));
}

// These lists must never change: a job that goes on after an update would see other samples.
TEST(Sampler, TheOrderIsTheSameOnEveryPlatform) {
  EXPECT_EQ(random_order<std::uint32_t>(10, 7), (std::vector<std::uint32_t>{8, 1, 5, 9, 0, 4, 3, 2, 6, 7}));
  auto sampler = sampler_of(10, 2, 0, {.shuffle = true, .seed = 7});
  EXPECT_EQ(sampler.indices(), (Indices{7, 9, 8, 0, 5}));
  sampler.set_epoch(1);
  EXPECT_EQ(sampler.indices(), (Indices{3, 4, 7, 8, 9}));
}

TEST(Sampler, WideAndNarrowIndicesHaveTheSameOrder) {
  for (const std::size_t size : {0, 1, 2, 1000}) {
    const auto narrow = random_order<std::uint32_t>(size, 5);
    const auto wide = random_order<std::uint64_t>(size, 5);
    EXPECT_TRUE(std::equal(narrow.begin(), narrow.end(), wide.begin(), wide.end()));
  }
}

// With 10 samples in 20,000 orders every sample is at every place about 2,000 times; 300 is seven deviations.
TEST(Sampler, EveryPlaceIsEquallyLikely) {
  std::size_t counts[10][10] = {};
  for (std::uint64_t seed = 0; seed < 20'000; ++seed) {
    const auto order = random_order<std::uint32_t>(10, mixed(seed));
    for (std::size_t place = 0; place < 10; ++place) ++counts[place][order[place]];
  }
  for (const auto& place : counts) {
    for (const std::size_t count : place) EXPECT_NEAR(static_cast<double>(count), 2000, 300);
  }
}

TEST(Sampler, EpochsAndSeedsChangeTheOrderAndNothingElseDoes) {
  auto sampler = sampler_of(1000, 4, 2, {.seed = 11});
  const Indices first = pass(sampler);
  EXPECT_EQ(pass(sampler), first) << "a second pass over the same epoch";
  EXPECT_EQ(pass(sampler, 64), first) << "another batch size";
  sampler.set_epoch(1);
  EXPECT_NE(pass(sampler), first);
  sampler.set_epoch(0);
  EXPECT_EQ(pass(sampler), first);
  auto other = sampler_of(1000, 4, 2, {.seed = 12});
  EXPECT_NE(pass(other), first);
}

TEST(Sampler, SizesBeyondInt32) {
  constexpr std::size_t kSize = 5'000'000'003;
  auto sampler = sampler_of(kSize, 2, 1, {.shuffle = false});
  EXPECT_EQ(sampler.local_size(), 2'500'000'002u);
  sampler.seek({.epoch = 0, .places = 5'000'000'000});
  sampler.reset();
  EXPECT_EQ(drawn_from(sampler, 8), (Indices{5'000'000'001, 0}));
  auto exact = sampler_of(kSize, 2, 1, {.shuffle = false, .mode = SamplerMode::evaluation});
  EXPECT_EQ(exact.local_size(), 2'500'000'001u);
  EXPECT_EQ(exact.local_batches(1000), 2'500'001u);
}

/// What is logged while a loop makes passes over the sampler, by itself or with set_epoch before each.
std::string log_of_passes(SamplerOptions options, int passes, bool sets_epoch) {
  testing::internal::CaptureStderr();
  DistributedSampler sampler(10, std::move(options));
  for (int pass = 0; pass < passes; ++pass) {
    if (sets_epoch) sampler.set_epoch(static_cast<std::size_t>(pass));
    sampler.reset();
    while (sampler.next(3)) {
    }
  }
  return testing::internal::GetCapturedStderr();
}

TEST(Sampler, ASecondEpochWithoutSetEpochIsWarnedOfOnce) {
  const SamplerOptions training{.num_replicas = 2, .rank = 0};
  const std::string log = log_of_passes(training, 3, false), warning = "epoch 0 begins again";
  EXPECT_NE(log.find(warning), std::string::npos) << log;
  EXPECT_EQ(log.find(warning), log.rfind(warning)) << log;
  EXPECT_EQ(log_of_passes(training, 1, false), "");
  EXPECT_EQ(log_of_passes(training, 3, true), "");
  EXPECT_EQ(log_of_passes({.num_replicas = 2, .rank = 0, .shuffle = false}, 3, false), "");
  EXPECT_EQ(log_of_passes({.num_replicas = 2, .rank = 0, .mode = SamplerMode::evaluation}, 3, false), "");
  EXPECT_EQ(log_of_passes({.num_replicas = 2, .rank = 1}, 3, false), "") << "rank 0 speaks for all";
}

TEST(Sampler, ResetWithAnotherSize) {
  auto sampler = sampler_of(10, 2, 0, {.shuffle = false});
  sampler.reset(4);
  EXPECT_EQ(sampler.dataset_size(), 4u);
  EXPECT_EQ(drawn_from(sampler, 3), (Indices{0, 2}));
  sampler.reset(0);
  EXPECT_FALSE(sampler.next(3).has_value());
}

TEST(Sampler, WrongOptionsAreOneClearLine) {
  EXPECT_EQ(error_of([] { DistributedSampler(10); }),
            "DistributedSampler: there is no default group; call init_process_group() first, or give .group, or both "
            ".num_replicas "
            "and .rank");
  EXPECT_EQ(error_of([] {
              DistributedSampler(10, {.num_replicas = 2});
            }).rfind("DistributedSampler: there is no default group", 0),
            0u);
  EXPECT_EQ(error_of([] { sampler_of(10, -2, 0); }),
            "DistributedSampler: num_replicas is -2; expected 1 or more (0: the size of the group)");
  EXPECT_EQ(error_of([] { sampler_of(10, 4, 4); }),
            "DistributedSampler: rank is 4; expected 0 to 3, as num_replicas is 4");
  EXPECT_EQ(error_of([] { sampler_of(10, 4, -2); }),
            "DistributedSampler: rank is -2; expected 0 to 3, as num_replicas is 4");
  EXPECT_EQ(
      error_of([] { sampler_of(10, 4, 0, {.drop_last = true, .mode = SamplerMode::evaluation}); }),
      "DistributedSampler: drop_last leaves samples out, and mode is evaluation, which promises not to; choose one");
  EXPECT_EQ(
      error_of([] { sampler_of(static_cast<std::size_t>(-1), 4, 0); }).rfind("DistributedSampler: a dataset of ", 0),
      0u);
  EXPECT_EQ(error_of([] { sampler_of(10, 2, 0).next(0); }), "DistributedSampler: a batch size of 0");
  EXPECT_EQ(error_of([] { sampler_of(10, 2, 0).local_batches(0); }), "DistributedSampler: a batch size of 0");
}

/// A dataset whose samples are their own indices.
struct Counting : torch::data::datasets::Dataset<Counting, std::size_t> {
  explicit Counting(std::size_t size) : size_(size) {}
  std::size_t get(std::size_t index) override { return index; }
  torch::optional<std::size_t> size() const override { return size_; }
  std::size_t size_;
};

TEST(Sampler, DrivesTheLoaderWithAndWithoutWorkers) {
  for (const std::size_t workers : {0, 3}) {
    auto sampler = sampler_of(103, 4, 3, {.seed = 9});
    auto loader = torch::data::make_data_loader(
        Counting(103), sampler, torch::data::DataLoaderOptions().batch_size(5).workers(workers).enforce_ordering(true));
    Indices earlier;
    for (std::size_t epoch = 0; epoch < 3; ++epoch) {
      sampler.set_epoch(epoch);  // reaches the loader's copy
      Indices got;
      for (auto& batch : *loader) got.insert(got.end(), batch.begin(), batch.end());
      EXPECT_EQ(got, sampler.indices()) << "epoch " << epoch << ", " << workers << " workers";
      EXPECT_NE(got, earlier);
      earlier = got;
    }
    sampler.set_epoch(1);
    const Indices whole = sampler.indices();
    sampler.seek({.epoch = 1, .places = 40});
    Indices rest;
    for (auto& batch : *loader) rest.insert(rest.end(), batch.begin(), batch.end());
    EXPECT_EQ(rest, Indices(whole.begin() + 10, whole.end()));
  }
}

TEST(Division, BatchesAndWorkers) {
  EXPECT_EQ(per_process_batch_size(256, 8), 32u);
  EXPECT_EQ(per_process_batch_size(3, 3), 1u);
  EXPECT_EQ(per_process_batch_size(7, 1), 7u);
  EXPECT_EQ(error_of([] { per_process_batch_size(100, 8); }),
            "per_process_batch_size: a batch of 100 is not a multiple of 8 processes; take 96 or 104");
  EXPECT_EQ(error_of([] { per_process_batch_size(3, 8); }),
            "per_process_batch_size: a batch of 3 leaves some of 8 processes without a sample; take 8 or more");
  EXPECT_EQ(error_of([] { per_process_batch_size(0, 8); }), "per_process_batch_size: a batch of 0");
  EXPECT_EQ(error_of([] { per_process_batch_size(8, 0); }),
            "per_process_batch_size: world_size is 0; expected 1 or more");
  EXPECT_EQ(per_process_workers(4, 4), 1u);
  EXPECT_EQ(per_process_workers(5, 4), 2u);
  EXPECT_EQ(per_process_workers(1, 4), 1u);
  EXPECT_EQ(per_process_workers(0, 4), 0u);
  EXPECT_EQ(error_of([] { per_process_workers(1, -1); }), "per_process_workers: world_size is -1; expected 1 or more");
}

}  // namespace
}  // namespace maniple::data_sampler_test
