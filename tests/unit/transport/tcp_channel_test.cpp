#include "transport/tcp_channel.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include <maniple/comm/error.h>

namespace maniple::test {
namespace {

using ::testing::HasSubstr;

class Congestion : public ::testing::Test {
 protected:
  Congestion() { ::unsetenv("MANIPLE_TCP_CONGESTION"); }
  ~Congestion() override { ::unsetenv("MANIPLE_TCP_CONGESTION"); }

  static std::string in_use(int fd) {
    char name[32] = {};
    socklen_t length = sizeof name;
    EXPECT_EQ(::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &length), 0);
    return name;
  }
  static UniqueFd socket() { return UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)); }
};

TEST_F(Congestion, is_the_systems_unless_named) {
  const std::string usual = in_use(socket().get());
  EXPECT_EQ(in_use(make_tcp_sink(socket(), tcp_channel_options())->fd()), usual);
}

TEST_F(Congestion, is_that_of_the_variable) {
  ::setenv("MANIPLE_TCP_CONGESTION", "reno", 1);  // every Linux has it
  EXPECT_EQ(in_use(make_tcp_sink(socket(), tcp_channel_options())->fd()), "reno");
  EXPECT_EQ(in_use(make_tcp_source(socket(), tcp_channel_options())->fd()), "reno");
}

TEST_F(Congestion, that_does_not_exist_is_named_at_once) {
  require_congestion("reno");
  try {
    require_congestion("pigeon");
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("tcp_allowed_congestion_control"));
  }
}

}  // namespace
}  // namespace maniple::test
