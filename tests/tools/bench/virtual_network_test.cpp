#include "tools/bench/virtual_network.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include <maniple/comm/error.h>

namespace maniple::bench {
namespace {

TEST(VirtualNetwork, HostsReachOnlyEachOther) {
  if (const std::string why = VirtualNetwork::why_not(); !why.empty()) GTEST_SKIP() << "no network namespaces: " << why;
  VirtualNetwork network(2, "100mbit");
  EXPECT_EQ(network.hosts(), 2);
  EXPECT_NO_THROW(network.run_on(0, "ip -4 neighbour flush dev eth0"));
  EXPECT_NO_THROW(network.run_on(0, "ip route get " + VirtualNetwork::address(1)));
  EXPECT_EQ(std::system(("nsenter --net=" + network.path(1) + " ip address show | grep -q 10.77.0.2").c_str()), 0);
  EXPECT_THROW(network.run_on(0, "ip route get 192.0.2.1"), Error);
  const InsideNamespace inside(network.descriptor(0));
  EXPECT_EQ(std::system("ip address show | grep -q 10.77.0.1"), 0);
}

TEST(VirtualNetwork, WhatAToolPrintsIsInTheError) {
  if (const std::string why = VirtualNetwork::why_not(); !why.empty()) GTEST_SKIP() << "no network namespaces: " << why;
  VirtualNetwork network(1);
  try {
    network.set_link(7, "down");
    ADD_FAILURE() << "there is no such host";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("port7"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("failed: "), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace maniple::bench
