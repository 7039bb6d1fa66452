#include "net/descriptor_limit.h"

#include <sys/resource.h>
#include <unistd.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "net/address.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

/// With this limit not one more descriptor can be opened.
rlim_t lowest_free() {
  const int fd = ::dup(STDERR_FILENO);
  ::close(fd);
  return static_cast<rlim_t>(fd);
}

class DescriptorLimit : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0); }
  void TearDown() override { ::setrlimit(RLIMIT_NOFILE, &before_); }
  rlimit before_{};
};

TEST_F(DescriptorLimit, IsRaisedToTheHardOne) {
  rlimit low = before_;
  low.rlim_cur = 64;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  EXPECT_TRUE(raise_descriptor_limit());
  EXPECT_EQ(descriptor_use().limit, before_.rlim_max);
  EXPECT_FALSE(raise_descriptor_limit());
}

TEST_F(DescriptorLimit, SocketsRaiseItByThemselves) {
  rlimit low = before_;
  low.rlim_cur = lowest_free();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  EXPECT_TRUE(static_cast<bool>(listen_on(Address::parse("127.0.0.1:0"))));
}

TEST_F(DescriptorLimit, TheErrorStatesNeededAndThere) {
  EXPECT_EXIT(
      {
        rlimit low{};
        low.rlim_cur = low.rlim_max = lowest_free();
        ::setrlimit(RLIMIT_NOFILE, &low);
        try {
          listen_on(Address::parse("127.0.0.1:0"));
        } catch (const SystemError& error) {
          std::fputs(error.what(), stderr);
          ::_exit(7);
        }
        ::_exit(8);
      },
      testing::ExitedWithCode(7), "[0-9]+ file descriptors are open, 1 more needed, but the limit is [0-9]+");
}

}  // namespace
}  // namespace maniple
