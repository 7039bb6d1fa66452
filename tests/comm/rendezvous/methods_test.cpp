#include "comm/rendezvous/methods.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

using testing::HasSubstr;

std::string complaint(std::string_view text) {
  try {
    const InitMethod method = parse_init_method(text);
    if (method.scheme == "tcp") parse_host_port(method.place, text);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(InitMethod, Parts) {
  const InitMethod method = parse_init_method("tcp://host:29500?rank=2&world_size=4");
  EXPECT_EQ(method.scheme, "tcp");
  EXPECT_EQ(method.place, "host:29500");
  EXPECT_EQ(method.rank, 2);
  EXPECT_EQ(method.world_size, 4);
  EXPECT_EQ(parse_init_method("env://").place, "");
  EXPECT_EQ(parse_init_method("file:///tmp/x").place, "/tmp/x");
}

TEST(InitMethod, HostAndPort) {
  EXPECT_EQ(parse_host_port("[::1]:80", "").host, "::1");
  EXPECT_EQ(parse_host_port("node1:80", "").port, 80);
}

TEST(InitMethod, WrongPartsAreNamed) {
  EXPECT_THAT(complaint("localhost:29500"), HasSubstr("no scheme"));
  EXPECT_THAT(complaint("http://x:1"), HasSubstr("unknown scheme \"http\""));
  EXPECT_THAT(complaint("tcp://host"), HasSubstr("not host:port"));
  EXPECT_THAT(complaint("tcp://:80"), HasSubstr("not host:port"));
  EXPECT_THAT(complaint("tcp://host:99999"), HasSubstr("\"99999\""));
  EXPECT_THAT(complaint("tcp://host:"), HasSubstr("1 to 65535"));
  EXPECT_THAT(complaint("tcp://::1:80"), HasSubstr("brackets"));
  EXPECT_THAT(complaint("tcp://h:1?rank=x"), HasSubstr("rank is \"x\""));
  EXPECT_THAT(complaint("tcp://h:1?world_size=0"), HasSubstr("world_size is \"0\""));
  EXPECT_THAT(complaint("tcp://h:1?size=4"), HasSubstr("unknown parameter \"size\""));
}

TEST(InitMethod, Agreement) {
  EXPECT_EQ(agreed({"a", 1}, {"b", std::nullopt}), 1);
  EXPECT_EQ(agreed({"a", std::nullopt}, {"b", 2}), 2);
  EXPECT_EQ(agreed({"a", 2}, {"b", 2}), 2);
  EXPECT_EQ(agreed({"a", std::nullopt}, {"b", std::nullopt}), std::nullopt);
  EXPECT_THROW(agreed({"a", 1}, {"b", 2}), InvalidArgument);
}

}  // namespace
}  // namespace maniple
