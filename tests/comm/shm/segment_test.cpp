#include "comm/shm/segment.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include <gtest/gtest.h>

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

TEST(Segment, ItsSizeIsSealed) {
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

class DescriptorPassing : public testing::Test {
 protected:
  void SetUp() override {
    int ends[2] = {-1, -1};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    here.reset(ends[0]);
    there.reset(ends[1]);
  }
  static Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }
  static std::pair<dev_t, ino_t> file_of(int fd) {
    struct stat facts{};
    EXPECT_EQ(::fstat(fd, &facts), 0);
    return {facts.st_dev, facts.st_ino};
  }
  UniqueFd here;
  UniqueFd there;
  UniqueFd file{::memfd_create("test", MFD_CLOEXEC)};
};

TEST_F(DescriptorPassing, TheOtherSideHasTheSameFileOpen) {
  send_descriptor(there.get(), file.get(), 0xfedcba9876543210ULL);
  const ReceivedDescriptor received = receive_descriptor(here.get(), soon());
  EXPECT_EQ(received.about, 0xfedcba9876543210ULL);
  EXPECT_NE(received.fd.get(), file.get());
  EXPECT_EQ(file_of(received.fd.get()), file_of(file.get()));
  EXPECT_NE(::fcntl(received.fd.get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST_F(DescriptorPassing, WaitsForAPeerThatIsLate) {
  std::thread peer([&] { send_descriptor(there.get(), file.get(), 1); });
  EXPECT_EQ(receive_descriptor(here.get(), soon()).about, 1u);
  peer.join();
}

TEST_F(DescriptorPassing, SilenceIsATimeout) {
  EXPECT_THROW(receive_descriptor(here.get(), Deadline::after(std::chrono::milliseconds(20))), Timeout);
}

// poll() takes 24 days at most, and we give it less: its end is not the deadline's.
TEST_F(DescriptorPassing, ALongLimitIsNotCutToTheLongestPoll) {
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(100));
  EXPECT_THROW(receive_descriptor(here.get(), deadline, -1, 1), Timeout);
  EXPECT_TRUE(deadline.expired());
}

TEST_F(DescriptorPassing, AnEndIsTheSystemsError) {
  there.reset();
  try {
    receive_descriptor(here.get(), soon());
    ADD_FAILURE() << "something arrived";
  } catch (const SystemError& error) {
    EXPECT_EQ(error.code(), ECONNRESET);
  }
  EXPECT_THROW(send_descriptor(here.get(), file.get(), 1), SystemError);
}

TEST_F(DescriptorPassing, BytesWithoutADescriptorAreRefused) {
  const std::uint64_t about = 1;
  ASSERT_EQ(::send(there.get(), &about, sizeof about, 0), static_cast<ssize_t>(sizeof about));
  EXPECT_THROW(receive_descriptor(here.get(), soon()), ProtocolError);
}

TEST_F(DescriptorPassing, StopsWhenCancelled) {
  const UniqueFd cancel(::eventfd(1, EFD_CLOEXEC));
  EXPECT_THROW(receive_descriptor(here.get(), soon(), cancel.get()), Aborted);
  send_descriptor(there.get(), file.get(), 7);
  EXPECT_EQ(receive_descriptor(here.get(), soon(), cancel.get()).about, 7u);  // what has arrived is taken first
}

}  // namespace

}  // namespace maniple
