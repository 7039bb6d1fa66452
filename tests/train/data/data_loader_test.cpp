// DataLoader: batches in order whatever the number of workers, errors that name the sample, cursors that count what the
// loop has taken.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <map>
#include <numeric>
#include <set>

#include "comm/base/format.h"
#include "harness/error_of.h"
#include <maniple/maniple.h>

namespace maniple::data_loader_test {
namespace {

/// Samples that are their own indices; some cannot be read.
struct Indices {
  std::size_t count = 0;
  std::set<std::size_t> broken = {};
  std::size_t get(std::size_t index) const {
    if (broken.count(index) != 0) throw std::runtime_error(format_text("the disk has no sample {}", index));
    return index;
  }
  std::size_t size() const { return count; }
};

std::vector<std::size_t> numbers(const torch::Tensor& batch) {
  const auto* from = batch.data_ptr<std::int64_t>();
  return {from, from + batch.numel()};
}

template <class Loader>
std::vector<std::size_t> take(Loader& loader, std::size_t most_batches = 1000) {
  std::vector<std::size_t> all;
  std::size_t batches = 0;
  for (auto& batch : loader) {
    const auto some = numbers(batch);
    all.insert(all.end(), some.begin(), some.end());
    if (++batches == most_batches) break;
  }
  return all;
}

DistributedSampler sampler_of(std::size_t size, int ranks, int rank, SamplerMode mode = SamplerMode::training) {
  return DistributedSampler(size, {.num_replicas = ranks, .rank = rank, .seed = 3, .mode = mode});
}

TEST(DataLoader, HandsOutTheSamplersOrderWithAnyNumberOfWorkersAndRanks) {
  for (const int ranks : {1, 2, 3}) {
    for (const std::size_t workers : {0, 1, 3}) {
      std::multiset<std::size_t> seen;
      for (int rank = 0; rank < ranks; ++rank) {
        auto sampler = sampler_of(23, ranks, rank, SamplerMode::evaluation);
        DataLoader loader(Indices{23}, sampler, {.batch_size = 4, .workers = workers});
        for (const std::size_t epoch : {0, 1}) {
          loader.set_epoch(epoch);
          const auto expected = sampler.indices();
          EXPECT_EQ(loader.batches(), (expected.size() + 3) / 4);
          EXPECT_EQ(take(loader), expected) << ranks << " ranks, " << workers << " workers, epoch " << epoch;
          if (epoch == 0) seen.insert(expected.begin(), expected.end());
        }
      }
      EXPECT_EQ(seen.size(), 23u);
      EXPECT_EQ(std::set<std::size_t>(seen.begin(), seen.end()).size(), 23u);
    }
  }
}

TEST(DataLoader, MakesASamplerForThisProcessAlone) {
  DataLoader loader(Indices{7}, {.batch_size = 3, .drop_last = true, .shuffle = false});
  EXPECT_EQ(take(loader), (std::vector<std::size_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(loader.batches(), 2u);
  DataLoader empty(Indices{0}, {.batch_size = 3, .workers = 2});
  EXPECT_EQ(take(empty).size(), 0u);
}

TEST(DataLoader, CursorCountsBatchesTakenByTheLoop) {
  for (const std::size_t workers : {0, 3}) {
    for (const bool drop_last : {false, true}) {
      DataLoader loader(Indices{10}, sampler_of(10, 1, 0),
                        {.batch_size = 4, .workers = workers, .drop_last = drop_last});
      EXPECT_EQ(loader.cursor_text(), "epoch 0, place 0 of 10, shuffle 1, seed 3");
      std::vector<std::string> inside;
      for ([[maybe_unused]] auto& batch : loader) inside.push_back(loader.cursor_text());
      ASSERT_EQ(inside.size(), drop_last ? 2u : 3u);
      EXPECT_EQ(inside[0], "epoch 0, place 4 of 10, shuffle 1, seed 3");
      EXPECT_EQ(inside[1], "epoch 0, place 8 of 10, shuffle 1, seed 3");
      EXPECT_EQ(inside.back(), format_text("epoch 0, place {} of 10, shuffle 1, seed 3", drop_last ? 8 : 10));
      EXPECT_EQ(loader.cursor_text(), "epoch 1, place 0 of 10, shuffle 1, seed 3") << "behind the loop";
    }
  }
}

TEST(DataLoader, GoesOnInTheMiddleOfAnEpochOnAnotherNumberOfRanks) {
  for (const int before : {1, 2, 3}) {
    for (const int after : {1, 2, 3}) {
      std::multiset<std::size_t> seen;
      std::string cursor;
      for (int rank = 0; rank < before; ++rank) {
        DataLoader loader(Indices{36}, sampler_of(36, before, rank), {.batch_size = 2, .workers = 2});
        const auto first = take(loader, 3);
        seen.insert(first.begin(), first.end());
        if (rank == 0) cursor = loader.cursor_text();
      }
      for (int rank = 0; rank < after; ++rank) {
        DataLoader loader(Indices{36}, sampler_of(36, after, rank), {.batch_size = 3, .workers = 1});
        loader.load_cursor(cursor);
        const auto rest = take(loader);
        seen.insert(rest.begin(), rest.end());
      }
      EXPECT_EQ(seen.size(), 36u) << before << " ranks, then " << after;
      EXPECT_EQ(std::set<std::size_t>(seen.begin(), seen.end()).size(), 36u) << before << " ranks, then " << after;
    }
  }
}

TEST(DataLoader, AnErrorNamesTheSampleAndTheLoaderStaysUsable) {
  for (const std::size_t workers : {0, 2}) {
    auto sampler = sampler_of(20, 1, 0);
    const auto order = sampler.indices();
    DataLoader loader(Indices{20, {order[9]}}, sampler, {.batch_size = 4, .workers = workers});
    std::vector<std::size_t> taken;
    bool thrown = false;
    try {
      for (auto& batch : loader) {
        const auto some = numbers(batch);
        taken.insert(taken.end(), some.begin(), some.end());
      }
    } catch (const DataError& error) {
      thrown = true;
      EXPECT_EQ(std::string(error.what()),
                format_text("DataLoader: index {}: the disk has no sample {}", order[9], order[9]));
      EXPECT_THROW(std::rethrow_if_nested(error), std::runtime_error);
    }
    EXPECT_TRUE(thrown);
    EXPECT_EQ(taken, std::vector<std::size_t>(order.begin(), order.begin() + 8)) << "the batches before it";
    EXPECT_EQ(loader.cursor_text(), "epoch 0, place 8 of 20, shuffle 1, seed 3");
    EXPECT_THROW(take(loader), DataError) << "the same batch again";
    loader.load_cursor("epoch 0, place 12 of 20, shuffle 1, seed 3");
    EXPECT_EQ(take(loader), std::vector<std::size_t>(order.begin() + 12, order.end()));
  }
}

TEST(DataLoader, AnErrorInTheVeryFirstBatchLeavesACursor) {
  DataLoader loader(Indices{4, {0, 1, 2, 3}}, sampler_of(4, 1, 0), {.batch_size = 2, .workers = 1});
  EXPECT_THROW(take(loader), DataError);
  EXPECT_EQ(loader.cursor_text(), "epoch 0, place 0 of 4, shuffle 1, seed 3");
}

TEST(DataLoader, IsDestroyedInTheMiddleOfAnEpoch) {
  for (const std::size_t taken : {1, 2, 50}) {
    DataLoader loader(Indices{1000}, {.batch_size = 2, .workers = 3, .prefetch = 4});
    EXPECT_EQ(take(loader, taken).size(), 2 * taken);
    EXPECT_EQ(take(loader, 1).size(), 2u);  // a new pass in the place of the old one
  }
}

TEST(DataLoader, HoldsAtMostThePrefetchedBatches) {
  struct Counting {
    std::atomic<std::size_t>*fetched, *taken, *most;
    std::size_t get(std::size_t index) const {
      const std::size_t ahead = ++*fetched - *taken;
      for (std::size_t before = *most; before < ahead && !most->compare_exchange_weak(before, ahead);) {
      }
      return index;
    }
    std::size_t size() const { return 200; }
  };
  std::atomic<std::size_t> fetched = 0, taken = 0, most = 0;
  DataLoader loader(Counting{&fetched, &taken, &most}, {.batch_size = 1, .workers = 2, .prefetch = 3});
  for ([[maybe_unused]] auto& batch : loader) ++taken;
  EXPECT_EQ(fetched, 200u);
  EXPECT_LE(most, 2u * 3u + 1u) << "six, and the one that the loop has and has not counted yet";
}

TEST(DataLoader, RandomNumbersDependOnSeedEpochAndIndexAlone) {
  const auto draw = [](std::size_t workers, int ranks, std::size_t epoch, std::uint64_t seed) {
    std::map<std::size_t, double> drawn;
    for (int rank = 0; rank < ranks; ++rank) {
      auto data = transformed(Indices{12}, [](std::size_t index, SampleRandom& random) {
        const auto more = torch::rand({1}, random.generator()).item<double>();
        return std::make_pair(index, random.unit() + static_cast<double>(random.below(1000)) + more);
      });
      DataLoader loader(data, sampler_of(12, ranks, rank), {.batch_size = 5, .workers = workers, .seed = seed});
      loader.set_epoch(epoch);
      for (auto& [index, number] : loader) {
        for (std::int64_t i = 0; i < index.size(0); ++i)
          drawn[numbers(index)[static_cast<std::size_t>(i)]] = number[i].template item<double>();
      }
    }
    return drawn;
  };
  const auto one = draw(0, 1, 0, 7);
  EXPECT_EQ(one.size(), 12u);
  EXPECT_EQ(draw(3, 1, 0, 7), one);
  EXPECT_EQ(draw(2, 3, 0, 7), one);
  EXPECT_NE(draw(0, 1, 1, 7), one);
  EXPECT_NE(draw(0, 1, 0, 8), one);
}

TEST(DataLoader, TakesTheDatasetsOfTorch) {
  const auto digits = Mnist::drawn(20, 1);
  DataLoader by_sample(digits, sampler_of(20, 1, 0), {.batch_size = 6, .workers = 2, .pin_memory = true});
  auto stacked = Mnist(digits).map(torch::data::transforms::Stack<>());
  DataLoader by_batch(stacked, sampler_of(20, 1, 0), {.batch_size = 6, .workers = 2});
  std::vector<torch::data::Example<>> first, second;
  for (auto& batch : by_sample) first.push_back(batch);
  for (auto& batch : by_batch) second.push_back(batch);
  ASSERT_EQ(first.size(), 4u);
  ASSERT_EQ(second.size(), 4u);
  for (std::size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].data.is_pinned(), torch::cuda::is_available());
    EXPECT_TRUE(torch::equal(first[i].data, second[i].data));
    EXPECT_TRUE(torch::equal(first[i].target, second[i].target));
  }
  EXPECT_EQ(first[0].data.sizes(), (std::vector<std::int64_t>{6, 1, 28, 28}));
}

TEST(DataLoader, StacksEveryComponentOfSamples) {
  using Sample = std::tuple<torch::Tensor, std::vector<torch::Tensor>, std::map<std::string, float>, std::string, bool>;
  struct Mixed {
    Sample get(std::size_t i) const {
      return {torch::full({2}, static_cast<double>(i)),
              {torch::ones({3}), torch::zeros({1})},
              {{"a", 0.5F}},
              "text",
              i == 1};
    }
    std::size_t size() const { return 3; }
  };
  DataLoader loader(Mixed{}, {.batch_size = 3, .shuffle = false});
  std::size_t batches = 0;
  for (auto& [tensor, list, map, texts, flags] : loader) {
    ++batches;
    EXPECT_TRUE(torch::equal(tensor, torch::tensor({{0.F, 0.F}, {1.F, 1.F}, {2.F, 2.F}})));
    ASSERT_EQ(list.size(), 2u);
    EXPECT_TRUE(torch::equal(list[0], torch::ones({3, 3})));
    EXPECT_TRUE(torch::equal(map.at("a"), torch::full({3}, 0.5F)));
    EXPECT_EQ(texts, (std::vector<std::string>{"text", "text", "text"}));
    EXPECT_TRUE(torch::equal(flags, torch::tensor({false, true, false})));
  }
  EXPECT_EQ(batches, 1u);

  DataLoader own(Indices{5}, {.batch_size = 5}, [](const std::vector<std::size_t>& some) {
    return std::accumulate(some.begin(), some.end(), std::size_t{0});
  });
  for (const std::size_t sum : own) EXPECT_EQ(sum, 10u);
}

TEST(DataLoader, MistakesAreNamed) {
  struct Ragged {
    torch::Tensor get(std::size_t i) const { return torch::zeros({1, static_cast<std::int64_t>(i) + 1}); }
    std::size_t size() const { return 4; }
  };
  DataLoader ragged(Ragged{}, {.batch_size = 2, .workers = 1, .shuffle = false});
  EXPECT_EQ(
      error_of([&] { ragged.begin(); }),
      "DataLoader: the batch that begins with index 0: samples have tensors of different shapes, [1, 1] and [1, 2] "
      "(sample 1 of the batch); give the loader a collate function");
  EXPECT_EQ(error_of([] { DataLoader(Indices{4}, {.batch_size = 0}); }), "DataLoader: a batch size of 0");
  EXPECT_EQ(error_of([] { DataLoader(Indices{4}, sampler_of(5, 1, 0)); }),
            "DataLoader: the dataset has 4 samples, but its sampler was made for 5");
}

struct NotCopied {
  NotCopied() = default;
  NotCopied(NotCopied&&) = default;
  torch::Tensor get(std::size_t index) { return torch::full({2}, static_cast<double>(index)); }
  std::size_t size() const { return 4; }
};

TEST(DataLoader, WorkersDoNotShareMutableState) {
  EXPECT_NE(error_of([] {
              DataLoader<NotCopied>(NotCopied(), {.batch_size = 2, .workers = 2});
            }).find("its get() is not const"),
            std::string::npos);
  DataLoader<NotCopied> loader(NotCopied(), {.batch_size = 2, .workers = 1, .shuffle = false});
  int batches = 0;
  for (const torch::Tensor& batch : loader) EXPECT_EQ(batch[1][0].item<int>(), 2 * batches++ + 1);
  EXPECT_EQ(batches, 2);
}

}  // namespace
}  // namespace maniple::data_loader_test
