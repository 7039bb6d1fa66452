#include "comm/base/log.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

namespace maniple {
namespace {

std::string logged(const std::function<void()>& body) {
  testing::internal::CaptureStderr();
  body();
  return testing::internal::GetCapturedStderr();
}

TEST(ThrottledLog, OneLineOfAKind) {
  const std::string text = logged([] {
    ThrottledLog log(std::chrono::hours(1));
    for (int i = 0; i < 100; ++i) log.warn("a", "first");
    log.warn("b", "second");
  });
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2) << text;
}

TEST(ThrottledLog, CountsWhatItLeftOut) {
  const std::string text = logged([] {
    ThrottledLog log(std::chrono::milliseconds(0));
    log.warn("a", "line");
    log.warn("a", "line");
  });
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2) << text;
}

}  // namespace
}  // namespace maniple
