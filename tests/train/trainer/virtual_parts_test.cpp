// The parts of training over virtual ranks: the order of additions, the division of samples, metrics.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "comm/base/format.h"
#include "harness/error_of.h"
#include "harness/run_ranks.h"
#include "train/ddp/virtual_tree.h"
#include <maniple/train/metrics.h>
#include <maniple/train/sampler.h>
#include <maniple/train/virtual_ranks.h>

namespace maniple::harness::virtual_parts_test {
namespace {

// ---- The tree -------------------------------------------------------------------------------------------------------

/// The sum of virtual ranks [begin, end) as text, along the definition of the tree.
std::string sum_of(int begin, int end, int level) {
  if (level == 0) return std::to_string(begin);
  const int middle = begin + (1 << (level - 1));
  if (middle >= end) return sum_of(begin, end, level - 1);
  return "(" + sum_of(begin, middle, level - 1) + "+" + sum_of(middle, end, level - 1) + ")";
}

/// The additions of TreeNodes, each rank's nodes appended to the nodes of the ranks before.
std::string sum_on(int total, int ranks) {
  const auto add = [](std::vector<std::string>& texts) {
    return [&texts](std::size_t i) {
      texts[i] = "(" + texts[i] + "+" + texts[i + 1] + ")";
      texts.pop_back();
    };
  };
  TreeNodes all(total);
  std::vector<std::string> texts;
  for (int rank = 0; rank < ranks; ++rank) {
    const VirtualRanks own = VirtualRanks::of(total, rank, ranks);
    TreeNodes nodes(total);
    std::vector<std::string> local;
    for (int v = own.first; v < own.first + own.count; ++v) {
      local.push_back(std::to_string(v));
      nodes.append({0, v}, add(local));
    }
    EXPECT_EQ(local.size(), nodes.all().size());
    for (std::size_t i = 0; i < local.size(); ++i) {
      texts.push_back(local[i]);
      all.append(nodes.all()[i], add(texts));
    }
  }
  EXPECT_EQ(texts.size(), 1u) << total << " on " << ranks;
  return texts.front();
}

TEST(VirtualParts, TheAdditionsAreTheSameOnEveryNumberOfRanks) {
  for (int total = 1; total <= 40; ++total) {
    int level = 0;
    while ((1 << level) < total) ++level;
    for (int ranks = 1; ranks <= total; ++ranks) EXPECT_EQ(sum_on(total, ranks), sum_of(0, total, level));
  }
}

TEST(VirtualParts, ShareTheVirtualRanksEvenly) {
  EXPECT_EQ(VirtualRanks::of(8, 0, 3), (VirtualRanks{8, 0, 3}));
  EXPECT_EQ(VirtualRanks::of(8, 2, 3), (VirtualRanks{8, 6, 2}));
  EXPECT_NE(error_of([] { VirtualRanks::of(2, 0, 3); }).find("3 ranks for 2 virtual ranks"), std::string::npos);
}

// ---- Samples --------------------------------------------------------------------------------------------------------

TEST(VirtualParts, EverySampleIsHandedOutOnceWhateverTheNumberOfRanks) {
  for (const SamplerMode mode : {SamplerMode::training, SamplerMode::evaluation}) {
    for (const std::size_t size : {75U, 64U, 9U, 3U}) {
      std::vector<std::vector<std::size_t>> first;
      for (const int ranks : {1, 2, 3, 8}) {
        std::vector<std::vector<std::size_t>> batches_of(8);  // by virtual rank
        for (int rank = 0; rank < ranks; ++rank) {
          DistributedSampler sampler(size, {.num_replicas = ranks, .rank = rank, .seed = 3, .mode = mode});
          const VirtualRanks own = VirtualRanks::of(8, rank, ranks);
          sampler.divide(own);
          sampler.divide(own);
          std::size_t batches = 0;
          while (const auto batch = sampler.next(4)) {
            auto& list =
                batches_of[static_cast<std::size_t>(own.first) + batches % static_cast<std::size_t>(own.count)];
            list.insert(list.end(), batch->begin(), batch->end());
            sampler.batch_done();
            ++batches;
          }
          sampler.load_cursor(format_text("epoch 0, place 0 of {}, shuffle 1, seed 3", size));
          EXPECT_EQ(batches, sampler.local_batches(4));
        }
        if (first.empty()) first = batches_of;
        EXPECT_EQ(batches_of, first) << size << " on " << ranks;
      }
      std::vector<int> times(size, 0);
      for (const auto& list : first) {
        for (const std::size_t index : list) ++times[index];
      }
      for (const int each : times) EXPECT_TRUE(each == 1 || (mode == SamplerMode::training && each <= 3)) << each;
    }
  }
}

TEST(VirtualParts, TheCursorCountsWholeTurns) {
  DistributedSampler sampler(64, {.num_replicas = 2, .rank = 0, .seed = 3});
  sampler.divide(VirtualRanks::of(8, 0, 2));
  for (int batch = 0; batch < 6; ++batch) {
    sampler.next(2);
    sampler.batch_done();
  }
  EXPECT_EQ(sampler.cursor(), (DistributedSampler::Cursor{0, 16}));
  EXPECT_NE(error_of([&] { sampler.next(3); }).find("batches of the same size"), std::string::npos);
  DistributedSampler other(64, {.num_replicas = 2, .rank = 1, .seed = 3});
  EXPECT_NE(error_of([&] { other.divide(VirtualRanks::of(8, 0, 2)); }).find("belong to another rank"),
            std::string::npos);
}

// ---- Metrics --------------------------------------------------------------------------------------------------------

TEST(VirtualParts, MetricsAreAddedInTheOrderOfVirtualRanks) {
  // Values whose sum depends on the order of additions.
  const auto value = [](int v) { return std::pow(-1.7, 3 * v) + 1e-9 * v; };
  std::vector<double> rows;
  for (const int n : {1, 2, 3, 5}) {
    const auto result = run_ranks({.n = n}, [&](Rank& r) {
      const VirtualRanks own = VirtualRanks::of(5, r.rank, r.size);
      std::vector<Metrics> parts(static_cast<std::size_t>(own.count));
      for (int i = 0; i < own.count; ++i) {
        parts[static_cast<std::size_t>(i)].add("loss", value(own.first + i), 3);
        if (own.first + i == 4) parts[static_cast<std::size_t>(i)].add_sum("last", 1);
      }
      const auto row = Metrics::all_reduce(parts, static_cast<std::size_t>((5 + n - 1) / n), r.world);
      EXPECT_EQ(row.text().substr(0, 5), "loss ");
      EXPECT_EQ(row["last"], 1);
      r.report("loss", format_text("{:a}", row["loss"]));
    });
    const auto texts = result.texts("loss");
    for (const auto& [rank, text] : texts) rows.push_back(std::strtod(text.c_str(), nullptr));
  }
  for (const double row : rows) EXPECT_EQ(row, rows.front());
}

}  // namespace
}  // namespace maniple::harness::virtual_parts_test
