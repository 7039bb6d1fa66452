// Batches ahead of the loop. The meta device takes the place of a GPU: tensors there have shapes, and reading ahead is
// the same.
#include <gtest/gtest.h>

#include <map>
#include <tuple>

#include <torch/torch.h>

#include "harness/error_of.h"
#include <maniple/train/prefetch.h>
#include <maniple/train/sampler.h>

namespace maniple::harness::prefetch_test {
namespace {

const torch::Device kElsewhere(torch::kMeta);

/// Hands out 0, 1, 2, ..., `count` batches of one number, and records how many were requested.
struct Counted {
  struct Iterator {
    Counted* range;
    int at;
    torch::Tensor operator*() const {
      if (at == range->fails_at) throw InvalidArgument("no batch 3");
      range->read = at + 1;
      return torch::full({at + 1}, at);
    }
    Iterator& operator++() {
      ++at;
      return *this;
    }
    bool operator!=(const Iterator& other) const { return at != other.at; }
  };
  Iterator begin() { return {this, 0}; }
  Iterator end() { return {this, count}; }
  int count = 5;
  int fails_at = -1;
  int read = 0;
};

TEST(Prefetch, OnTheCpuBatchesPassThroughOneAtATime) {
  Counted range;
  int seen = 0;
  for (auto& batch : prefetch_to(torch::kCPU, range)) {
    EXPECT_EQ(batch.sum().item<int>(), seen * (seen + 1));
    EXPECT_EQ(range.read, ++seen);
  }
  EXPECT_EQ(seen, 5);
}

TEST(Prefetch, ReadsTheRequestedNumberAhead) {
  for (const std::size_t ahead : {1u, 2u, 9u}) {
    Counted range;
    auto batches = prefetch_to(kElsewhere, range, {.batches = ahead});
    for (int pass = 0; pass < 2; ++pass) {
      int seen = 0;
      for (auto& batch : batches) {
        EXPECT_EQ(batch.device(), kElsewhere);
        EXPECT_EQ(batch.numel(), ++seen);
        EXPECT_EQ(range.read, std::min(5, seen + static_cast<int>(ahead)));
      }
      EXPECT_EQ(seen, 5);
    }
  }
  Counted none{.count = 0};
  for (auto& batch : prefetch_to(kElsewhere, none)) ADD_FAILURE() << batch.numel();
  EXPECT_NE(error_of([&] { prefetch_to(kElsewhere, none, {.batches = 0}); }).find("0 batches"), std::string::npos);
}

TEST(Prefetch, ExceptionsOfTheRangeArriveInOrder) {
  for (const torch::Device device : {torch::Device(torch::kCPU), kElsewhere}) {
    Counted range{.fails_at = 3};
    int seen = 0;
    const std::string error = error_of([&] {
      for (auto& batch : prefetch_to(device, range)) seen += batch.numel() > 0 ? 1 : 0;
    });
    EXPECT_NE(error.find("no batch 3"), std::string::npos) << error;
    EXPECT_EQ(seen, 3) << "those before it";
  }
}

TEST(Prefetch, AllTensorsOfABatchAreCopied) {
  using Batch = std::tuple<torch::Tensor, std::vector<torch::Tensor>, std::map<std::string, torch::Tensor>, int>;
  std::vector<Batch> given;
  given.emplace_back(torch::ones({2}), std::vector{torch::ones({3}), torch::Tensor()},
                     std::map<std::string, torch::Tensor>{{"mask", torch::ones({4})}}, 7);
  int seen = 0;
  for (const auto& [one, list, named, number] : prefetch_to(kElsewhere, given)) {
    EXPECT_EQ(one.device(), kElsewhere);
    EXPECT_EQ(list[0].device(), kElsewhere);
    EXPECT_FALSE(list[1].defined());
    EXPECT_EQ(named.at("mask").device(), kElsewhere);
    EXPECT_EQ(number, 7);
    ++seen;
  }
  EXPECT_EQ(seen, 1);
  EXPECT_TRUE(std::get<0>(given[0]).is_cpu()) << "the range keeps its own";
  using Unlabelled = torch::data::Example<torch::Tensor, torch::data::example::NoTarget>;
  for (auto& batch : prefetch_to(kElsewhere, std::vector<Unlabelled>{{torch::ones({2})}})) {  // of a temporary
    EXPECT_EQ(batch.data.device(), kElsewhere);
  }
}

struct Numbers : torch::data::datasets::Dataset<Numbers> {
  torch::data::Example<> get(std::size_t index) override {
    return {torch::full({2}, static_cast<std::int64_t>(index)), torch::full({}, 1)};
  }
  torch::optional<std::size_t> size() const override { return 20; }
};

TEST(Prefetch, ALoaderWhoseBatchesAreCounted) {
  DistributedSampler sampler(20, {.num_replicas = 1, .rank = 0, .shuffle = false});
  const auto loader = torch::data::make_data_loader(Numbers().map(torch::data::transforms::Stack<>()), sampler, 4);
  for (const torch::Device device : {torch::Device(torch::kCPU), kElsewhere}) {
    auto batches = prefetch_to(device, *loader);
    for (std::size_t epoch = 0; epoch < 2; ++epoch) {
      sampler.set_epoch(epoch);
      std::size_t seen = 0;
      for (auto& batch : sampler.counting(batches)) {
        EXPECT_EQ(batch.data.sizes(), (std::vector<std::int64_t>{4, 2}));
        EXPECT_EQ(batch.target.device(), device);
        seen += 4;
        EXPECT_EQ(sampler.cursor().places, seen) << "what was read ahead does not count";
      }
      EXPECT_EQ(seen, 20u);
    }
  }
}

struct Epochs : std::vector<torch::Tensor> {
  void set_epoch(std::size_t number) { epoch = number; }
  std::size_t epoch = 0;
};

TEST(Prefetch, SetsTheEpochOfTheLoader) {
  Epochs epochs;
  prefetch_to(torch::kCPU, epochs).set_epoch(3);
  EXPECT_EQ(epochs.epoch, 3u);
}

}  // namespace
}  // namespace maniple::harness::prefetch_test
