#include "comm/base/copy.h"

#include <gtest/gtest.h>

#include <vector>

namespace maniple {
namespace {

TEST(CopyPastCaches, EveryAlignmentAndLength) {
  constexpr std::size_t kRoom = 8 * 4096;
  std::vector<unsigned char> from(kRoom + 256);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 7 + i / 251 + 1);
  const std::size_t lengths[] = {0,    1, 15, 63, 64, 65, 127, 4095, 4096, 4097, 4 * 4096 - 1, 4 * 4096, 5 * 4096 + 77,
                                 kRoom};
  for (const std::size_t length : lengths) {
    for (const std::size_t to_offset : {0, 1, 8, 16, 63, 64}) {
      for (const std::size_t from_offset : {0, 1, 4, 64, 127}) {
        SCOPED_TRACE(testing::Message() << length << " bytes from " << from_offset << " to " << to_offset);
        std::vector<unsigned char> to(kRoom + 256, 0);
        copy_past_caches(to.data() + to_offset, from.data() + from_offset, length);
        std::vector<unsigned char> expected(to.size(), 0);
        std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(from_offset), length,
                    expected.begin() + static_cast<std::ptrdiff_t>(to_offset));
        ASSERT_EQ(to, expected);
      }
    }
  }
  copy_past_caches(nullptr, nullptr, 0);
}

TEST(CopyPastCaches, IsUsedOnlyForDataLargerThanTheCaches) {
  EXPECT_FALSE(exceeds_caches(0, 0));
  EXPECT_FALSE(exceeds_caches(4096, 8));
  const bool ever = exceeds_caches(std::size_t{1} << 40, 1);
  EXPECT_EQ(exceeds_caches(std::size_t{1} << 40, 64), ever);
#ifdef __x86_64__
  EXPECT_TRUE(ever);
#endif
}

}  // namespace
}  // namespace maniple
