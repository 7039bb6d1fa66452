// The choice between two ways by what calls of each have cost.
#include "comm/shm/faster_way.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace maniple {
namespace {

using Cost = std::function<double(int way, int call)>;

// The ways that `calls` calls take, beginning with `at_first`.
std::vector<int> ways_of(FasterWay& choice, int calls, int at_first, const Cost& cost) {
  std::vector<int> ways;
  for (int call = 0; call < calls; ++call) {
    ways.push_back(choice.next(at_first));
    choice.add(cost(ways.back(), call));
  }
  return ways;
}

constexpr int kTries = static_cast<int>(FasterWay::kTries);
constexpr int kShortest = static_cast<int>(FasterWay::kShortest);
constexpr int kLongest = static_cast<int>(FasterWay::kLongest);

TEST(FasterWay, TriesBothAndTakesTheFaster) {
  for (const int at_first : {0, 1}) {
    for (const int faster : {0, 1}) {
      FasterWay choice;
      const auto ways = ways_of(choice, kShortest, at_first, [&](int way, int) { return way == faster ? 1.0 : 2.0; });
      for (int call = 0; call < kShortest; ++call) {
        const int expected = call < kTries ? at_first : call < 2 * kTries ? 1 - at_first : faster;
        EXPECT_EQ(ways[static_cast<std::size_t>(call)], expected) << "call " << call;
      }
    }
  }
}

TEST(FasterWay, TakesTheSlowerOneInFewerThanOneCallOfAHundred) {
  FasterWay choice;
  int slower = 0;
  const int calls = 20 * kLongest;
  for (const int way : ways_of(choice, calls, 0, [](int way, int) { return way == 0 ? 1.0 : 1.5; })) slower += way;
  EXPECT_GT(slower, 0) << "or it would never see that things have changed";
  EXPECT_LT(slower * 100, calls);
}

TEST(FasterWay, FollowsWhenTheOtherBecomesFaster) {
  FasterWay choice;
  ways_of(choice, 10, 0, [](int way, int) { return way == 0 ? 1.0 : 2.0; });
  const auto ways = ways_of(choice, 2 * kShortest, 0, [](int way, int) { return way == 0 ? 2.0 : 1.0; });
  EXPECT_EQ(ways.front(), 0);
  EXPECT_EQ(ways.back(), 1);
}

TEST(FasterWay, FollowsAfterAThousandCallsAtTheLatest) {
  FasterWay choice;
  ways_of(choice, 10 * kLongest, 0, [](int way, int) { return way == 0 ? 1.0 : 2.0; });
  const auto ways = ways_of(choice, kLongest + 2 * kTries, 0, [](int way, int) { return way == 0 ? 2.0 : 1.0; });
  EXPECT_EQ(ways.back(), 1);
}

TEST(FasterWay, DisturbedCallsDoNotMislead) {
  FasterWay choice;
  // All but one of the tries of the faster way are held up.
  const auto cost = [](int way, int call) { return way == 1 ? (call % kTries == 1 ? 1.0 : 50.0) : 2.0; };
  EXPECT_EQ(ways_of(choice, 2 * kTries + 1, 0, cost).back(), 1);
}

TEST(FasterWay, StaysWhereBothAreAboutEqual) {
  FasterWay choice;
  const auto ways = ways_of(choice, 2 * kTries + 1, 1, [](int way, int) { return way == 1 ? 1.0 : 0.97; });
  EXPECT_EQ(ways.back(), 1);
}

// A call that failed is not added.
TEST(FasterWay, AnUnfinishedVariantIsTriedAgain) {
  FasterWay choice;
  ways_of(choice, kTries, 0, [](int, int) { return 1.0; });
  EXPECT_EQ(choice.next(0), 1);
  EXPECT_EQ(choice.next(0), 1);
}

}  // namespace
}  // namespace maniple
