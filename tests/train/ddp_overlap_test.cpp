#include "train/ddp/overlap.h"

#include <gtest/gtest.h>

namespace maniple::ddp_overlap_test {
namespace {

constexpr std::size_t kLarge = 100 << 20;

TEST(ChooseOverlap, HidesTheNetworkBetweenHosts) {
  EXPECT_EQ(choose_overlap({.hosts = 2, .cores = 1, .threads = 4, .gradient_bytes = 4}), Overlap::thread);
}

TEST(ChooseOverlap, TakesNoCoreFromTheComputation) {
  EXPECT_EQ(choose_overlap({.cores = 2, .threads = 2, .gradient_bytes = kLarge}), Overlap::none);
  EXPECT_EQ(choose_overlap({.cores = 16, .threads = 16, .gradient_bytes = kLarge}), Overlap::none);
  EXPECT_EQ(choose_overlap({.cores = 16, .threads = 8, .gradient_bytes = kLarge}), Overlap::none);
}

TEST(ChooseOverlap, UsesSpareCoresForLargeGradients) {
  EXPECT_EQ(choose_overlap({.cores = 16, .threads = 4, .gradient_bytes = kLarge}), Overlap::thread);
  EXPECT_EQ(choose_overlap({.cores = 16, .threads = 4, .gradient_bytes = 200'000}), Overlap::none);
}

}  // namespace
}  // namespace maniple::ddp_overlap_test
