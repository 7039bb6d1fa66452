// What is decided before a backward: which gradients share a bucket, and when buckets are averaged.
#include "train/ddp/bucket.h"

#include <gtest/gtest.h>

namespace maniple::ddp_plan_test {
namespace {

std::vector<std::vector<std::size_t>> members(const std::vector<PlannedBucket>& plan) {
  std::vector<std::vector<std::size_t>> result;
  for (const PlannedBucket& bucket : plan) result.push_back(bucket.members);
  return result;
}

TEST(BucketPlan, ClosesABucketAtItsLimit) {
  const std::vector<PlannedParameter> parameters(6, {100, 4, 0});
  const std::vector<std::size_t> order{5, 4, 3, 2, 1, 0};
  using Lists = std::vector<std::vector<std::size_t>>;
  EXPECT_EQ(members(plan_buckets(parameters, order, {400, 800})), (Lists{{5}, {4, 3}, {2, 1}, {0}}));
  EXPECT_EQ(members(plan_buckets(parameters, order, {401, 1e9})), (Lists{{5, 4}, {3, 2, 1, 0}}));
  EXPECT_EQ(members(plan_buckets(parameters, order, {0, 1})), (Lists{{5}, {4}, {3}, {2}, {1}, {0}}));
  EXPECT_TRUE(plan_buckets({}, {}, {1, 1}).empty());
}

TEST(BucketPlan, KeepsKindsApartAndNumbersByTheLastGradient) {
  const std::vector<PlannedParameter> parameters{{10, 4, 6}, {10, 8, 7}, {10, 4, 6}, {0, 8, 7}, {3, 2, 5}};
  const auto plan = plan_buckets(parameters, std::vector<std::size_t>{0, 1, 2, 3, 4}, {1e9, 1e9});
  ASSERT_EQ(plan.size(), 3u);
  EXPECT_EQ(plan[0].members, (std::vector<std::size_t>{0, 2}));  // complete with the third gradient
  EXPECT_EQ(plan[1].members, (std::vector<std::size_t>{1, 3}));
  EXPECT_EQ(plan[2].members, (std::vector<std::size_t>{4}));
  EXPECT_EQ(plan[0].layout.offset(1), 16u);
  EXPECT_EQ(plan[0].layout.bytes(), 128u);
  EXPECT_EQ(plan[1].layout.bytes(), 128u);
  EXPECT_EQ(plan[2].layout.bytes(), 64u);
}

// ---- When buckets are averaged --------------------------------------------------------------------------------------

constexpr std::size_t kLarge = 100 << 20;

TEST(ChooseOverlap, HidesTheNetworkBetweenHosts) {
  EXPECT_EQ(choose_overlap({.hosts = 2, .cores = 1, .threads = 4, .gradient_bytes = 4}), Overlap::thread);
}

TEST(ChooseOverlap, TakesNoCoreFromTheComputation) {
  EXPECT_EQ(choose_overlap({.cores = 2, .threads = 2, .gradient_bytes = kLarge}), Overlap::none);
  EXPECT_EQ(choose_overlap({.cores = 16, .threads = 16, .gradient_bytes = kLarge}), Overlap::none);
  EXPECT_EQ(choose_overlap({.cores = 15, .threads = 8, .gradient_bytes = kLarge}), Overlap::none);
}

TEST(ChooseOverlap, UsesSpareCoresForLargeGradients) {
  EXPECT_EQ(choose_overlap({.cores = 16, .threads = 8, .gradient_bytes = kLarge}), Overlap::thread);
  EXPECT_EQ(choose_overlap({.cores = 16, .threads = 4, .gradient_bytes = 200'000}), Overlap::none);
}

}  // namespace
}  // namespace maniple::ddp_plan_test
