#include "shm/descriptor_passing.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <thread>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

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

TEST_F(DescriptorPassing, GivesUpWhenItIsTold) {
  const UniqueFd cancel(::eventfd(1, EFD_CLOEXEC));
  EXPECT_THROW(receive_descriptor(here.get(), soon(), cancel.get()), Aborted);
  send_descriptor(there.get(), file.get(), 7);
  EXPECT_EQ(receive_descriptor(here.get(), soon(), cancel.get()).about, 7u);  // what has arrived is taken first
}

}  // namespace
}  // namespace maniple
