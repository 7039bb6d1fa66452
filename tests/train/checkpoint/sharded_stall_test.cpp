// How long a save of 2 GB by 4 ranks stops training, compared with a plain copy of a rank's part. No test: it prints
// figures.
//
//   build/bin/tests/parallel_tests --gtest_also_run_disabled_tests --gtest_filter='*StallOfTwoGigabytes'
#include <algorithm>
#include <cstring>

#include <gtest/gtest.h>

#include "harness/run_ranks.h"
#include "harness/shared_folder.h"
#include <maniple/train/checkpoint.h>

namespace maniple::harness::sharded_stall_test {
namespace {

TEST(ShardedCheckpoint, DISABLED_StallOfTwoGigabytes) {
  constexpr std::int64_t kTensors = 64,
                         kElements = (std::int64_t{2} << 30) / 4 / 4 / kTensors;  // float32, of each rank
  const SharedFolder shared;
  const auto result = run_ranks(
      {.n = 4, .as = As::processes, .timeout = Seconds(500), .limit = Seconds(580), .env = shared.env()}, [&](Rank& r) {
        torch::set_num_threads(1);
        std::vector<torch::Tensor> tensors, copies;
        for (std::int64_t i = 0; i < kTensors; ++i) {
          tensors.push_back(torch::full({kElements}, static_cast<double>(r.rank)));
          copies.push_back(torch::zeros({kElements}));
        }
        Checkpoint checkpoint({.folder = SharedFolder::here(), .keep_last = 1, .sharded = true, .group = r.world});
        const auto state = [&] {
          ShardedState held;
          for (std::int64_t i = 0; i < kTensors; ++i) {
            held.tensors.push_back(TensorShard::along("w" + std::to_string(i), tensors[static_cast<std::size_t>(i)], 0,
                                                      r.rank * kElements, 4 * kElements));
          }
          return held;
        };
        checkpoint.add("model", state, [](const SavedPart&) {});
        std::vector<double> saves, plain;
        for (std::int64_t step = 0; step < 8; ++step) {
          r.world->barrier();
          double begin = now_s();
          for (std::size_t i = 0; i < tensors.size(); ++i)
            std::memcpy(copies[i].data_ptr(), tensors[i].data_ptr(), tensors[i].nbytes());
          plain.push_back(now_s() - begin);
          r.world->barrier();
          begin = now_s();
          checkpoint.save(step);
          saves.push_back(now_s() - begin);
          checkpoint.wait();
          EXPECT_EQ(checkpoint.last_error(), "");
        }
        r.report("first", 1000 * saves[0]);  // finds the memory
        for (auto* times : {&plain, &saves}) {
          times->erase(times->begin());
          std::sort(times->begin(), times->end());
          r.report(times == &plain ? "copy" : "save", 1000 * (*times)[times->size() / 2]);
        }
      });
  for (const char* key : {"copy", "first", "save"}) {
    for (const auto& [rank, ms] : result.numbers(key)) std::printf("rank %d %s: %.1f ms\n", rank, key, ms);
  }
}

}  // namespace
}  // namespace maniple::harness::sharded_stall_test
