#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

constexpr std::size_t kBytes = 10'000;

UniqueFd copy_of(int fd) { return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

UniqueFd memory_file(std::size_t bytes, int seals) {
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

TEST(Segment, IsZeroAndSharedByAllThatMapIt) {
  const auto maker = Segment::create(kBytes);
  ASSERT_EQ(maker->size(), kBytes);
  EXPECT_TRUE(std::all_of(maker->data(), maker->data() + kBytes, [](std::byte b) { return b == std::byte{0}; }));
  const auto taker = Segment::adopt(copy_of(maker->fd()), kBytes);
  ASSERT_NE(taker->data(), maker->data());
  maker->data()[kBytes - 1] = std::byte{42};
  EXPECT_EQ(taker->data()[kBytes - 1], std::byte{42});
}

TEST(Segment, LivesWithoutItsDescriptor) {
  const auto segment = Segment::create(kBytes);
  segment->close_fd();
  segment->data()[kBytes - 1] = std::byte{1};
  EXPECT_EQ(segment->data()[kBytes - 1], std::byte{1});
}

TEST(Segment, NobodyCanChangeItsSize) {
  const auto segment = Segment::create(kBytes);
  EXPECT_EQ(::ftruncate(segment->fd(), 0), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::ftruncate(segment->fd(), 2 * kBytes), -1);
  EXPECT_EQ(errno, EPERM);
}

TEST(Segment, IsClosedOnExec) {
  const auto segment = Segment::create(kBytes);
  EXPECT_NE(::fcntl(segment->fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(Segment, AdoptsOnlyWhatCannotShrink) {
  EXPECT_NO_THROW(Segment::adopt(memory_file(kBytes, F_SEAL_SHRINK), kBytes));
  EXPECT_NO_THROW(Segment::adopt(memory_file(kBytes + 1, F_SEAL_SHRINK), kBytes));
  EXPECT_THROW(Segment::adopt(memory_file(kBytes, F_SEAL_GROW), kBytes), ProtocolError);
  EXPECT_THROW(Segment::adopt(memory_file(kBytes - 1, F_SEAL_SHRINK), kBytes), ProtocolError);
  EXPECT_THROW(Segment::adopt(UniqueFd(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC)), 16), ProtocolError);
  EXPECT_THROW(Segment::adopt(UniqueFd(), kBytes), SystemError);
}

TEST(Segment, MemoryThatIsNotThereIsAnErrorAndNotASignal) {
  const auto segment = Segment::create(kBytes);
  EXPECT_NO_THROW(segment->populate(0, kBytes));
  EXPECT_NO_THROW(segment->populate(kBytes, 0));
  EXPECT_THROW(segment->populate(0, kBytes * 2), SystemError);  // beyond the sealed end
}

TEST(Segment, HugePages) {
  constexpr std::size_t kHuge = 2 << 20;
  EXPECT_EQ(round_to_huge_page(0), 0u);
  EXPECT_EQ(round_to_huge_page(1), kHuge);
  EXPECT_EQ(round_to_huge_page(kHuge), kHuge);
  EXPECT_EQ(round_to_huge_page(kHuge + 1), 2 * kHuge);
}

}  // namespace
}  // namespace maniple
