// Connecting and resolving while routes and name servers are missing: what may pass is retried, what is final is not.
#include <sys/mount.h>

#include <cerrno>
#include <fstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/net/address.h"
#include "comm/net/own_network.h"
#include "harness/temporary_directory.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

struct Route {
  const char* kind;
  int code;
  const char* text;
};
void PrintTo(const Route& route, std::ostream* out) { *out << route.kind; }

class Routes : public testing::TestWithParam<Route> {};

TEST_P(Routes, AreRetriedUntilTheyArePassable) {
  in_own_network([] {
    const Route& route = GetParam();
    const Address address = Address::parse("192.0.2.1:9");
    run("ip link set lo up");
    if (*route.kind != '\0') run(std::string("ip route add ") + route.kind + " 192.0.2.1");
    try {
      connect_to(address, Deadline::after(seconds(20)));
      ADD_FAILURE() << "connected";
    } catch (const SystemError& error) {
      EXPECT_EQ(error.code(), route.code);
      EXPECT_TRUE(network_may_recover(error.code()));
      EXPECT_THAT(error.what(), HasSubstr(route.text));
    }
    try {
      connect_to(address, Deadline::after(milliseconds(50)), true);
      ADD_FAILURE() << "connected";
    } catch (const Timeout& error) {
      EXPECT_THAT(error.what(), HasSubstr(route.text));
    }
    try {
      route_to(address);
      ADD_FAILURE() << "routed";
    } catch (const SystemError& error) {
      EXPECT_THAT(error.what(), HasSubstr(route.text));
    }
    UniqueFd listener;
    std::thread repair([&] {
      if (*route.kind != '\0') run(std::string("ip route del ") + route.kind + " 192.0.2.1");
      run("ip addr add 192.0.2.1/32 dev lo");
      listener = listen_on(address);
    });
    EXPECT_TRUE(static_cast<bool>(connect_to(address, Deadline::after(seconds(20)), true)));
    repair.join();
  });
}

INSTANTIATE_TEST_SUITE_P(Net, Routes,
                         testing::Values(Route{"", ENETUNREACH, "unreachable"},
                                         Route{"blackhole", EINVAL, "a blackhole route leads there"},
                                         Route{"prohibit", EACCES, "a prohibit route leads there"},
                                         Route{"unreachable", EHOSTUNREACH, "No route to host"}));

TEST(RoutesV6, ALinkLocalAddressWithoutItsInterfaceIsFinal) {
  try {
    connect_to(Address::parse("[fe80::1]:9"), Deadline::after(seconds(20)), true);
    FAIL() << "connected";
  } catch (const SystemError& error) {
    if (error.code() == EAFNOSUPPORT) GTEST_SKIP() << "this system has no IPv6";
    EXPECT_EQ(error.code(), EINVAL);
    EXPECT_THAT(error.what(), HasSubstr("needs its interface"));
  }
}

// Every local port is in use, which says nothing about the peer.
TEST(LocalPorts, AreAwaitedWhenAllAreTaken) {
  in_own_network([] {
    run("ip link set lo up");
    run("echo 40000 40001 > /proc/sys/net/ipv4/ip_local_port_range");
    const UniqueFd listener = listen_on(Address::parse("127.0.0.1:39999"));
    const Address address = Address::of_socket(listener.get());
    UniqueFd taken[2];
    for (UniqueFd& fd : taken) fd = connect_to(address, Deadline::after(seconds(20)));
    try {
      connect_to(address, Deadline::after(seconds(20)));
      ADD_FAILURE() << "connected";
    } catch (const SystemError& error) {
      EXPECT_EQ(error.code(), EADDRNOTAVAIL);
      EXPECT_TRUE(is_local_shortage(error.code()));
      EXPECT_FALSE(network_may_recover(error.code()));
      EXPECT_THAT(error.what(), HasSubstr("no free local port"));
    }
    std::thread release([&] {
      const linger at_once{.l_onoff = 1, .l_linger = 0};  // no TIME_WAIT
      ::setsockopt(taken[0].get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
      taken[0].reset();
    });
    EXPECT_TRUE(static_cast<bool>(connect_to(address, Deadline::after(seconds(20)), true)));
    release.join();
  });
}

// The resolver cannot reach its name server at first.
TEST(Resolver, IsAskedAgainAfterATemporaryFailure) {
  in_own_network([] {
    const harness::TemporaryDirectory folder;
    const auto replace = [&](const std::string& file, const std::string& text) {
      const std::string ours = folder.path() + "/" + file;
      std::ofstream(ours) << text;
      ASSERT_EQ(::mount(ours.c_str(), ("/etc/" + file).c_str(), nullptr, MS_BIND, nullptr), 0) << errno;
    };
    replace("resolv.conf", "nameserver 192.0.2.53\n");
    replace("nsswitch.conf", "hosts: files dns\n");
    replace("hosts", "127.0.0.1 localhost\n");
    try {
      Address::resolve("late.example", 1, Deadline::after(milliseconds(300)));
      ADD_FAILURE() << "resolved";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("late.example"));
    }
    std::thread late([&] { std::ofstream(folder.path() + "/hosts", std::ios::app) << "192.0.2.7 late.example\n"; });
    EXPECT_EQ(Address::resolve("late.example", 5, Deadline::after(seconds(20))).at(0).to_string(), "192.0.2.7:5");
    late.join();
  });
}

}  // namespace
}  // namespace maniple
