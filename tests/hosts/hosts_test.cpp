// What only several hosts show: who lives where, which way bytes travel, and how many of them cross the link.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "harness/run_ranks.h"

namespace maniple::harness {
namespace {

TEST(Hosts, TopologyIsRecognisedByFact) {
  // The variables lie; the namespaces do not.
  run_ranks({.n = 5, .as = As::netns, .hosts = 2, .env = {{"LOCAL_WORLD_SIZE", "5"}}}, [](Rank& r) {
    const Topology& topology = r.world->topology();
    ASSERT_EQ(topology.node_count(), 2);
    EXPECT_EQ(topology.nodes[0], (std::vector<int>{0, 1, 2}));
    EXPECT_EQ(topology.nodes[1], (std::vector<int>{3, 4}));
    EXPECT_EQ(topology.node_rank(), r.host);
    EXPECT_EQ(topology.local_rank(), r.host == 0 ? r.rank : r.rank - 3);
    EXPECT_EQ(topology.local_size(), r.host == 0 ? 3 : 2);
  });
}

TEST(Hosts, SubGroupsHaveTheirOwnTopologyAndTransport) {
  run_ranks({.n = 4, .as = As::netns, .hosts = 2}, [](Rank& r) {
    const auto local = r.world->split(r.host);
    EXPECT_EQ(local->transport(), "shm");
    EXPECT_EQ(local->topology().node_count(), 1);
    const auto across = r.world->split(r.rank % 2);
    EXPECT_EQ(across->transport(), "tcp");
    EXPECT_EQ(across->topology().node_count(), 2);
    EXPECT_EQ(across->topology().local_size(), 1);
    for (const auto& group : {local, across}) {
      std::vector<float> values(10'000, 1.0f);
      group->all_reduce(buffer_of(values));
      EXPECT_EQ(values.back(), 2.0f);
    }
  });
}

struct Traffic {
  double received = 0;
  double sent = 0;
};

// Bytes that eth0 of this rank's host has carried.
Traffic traffic() {
  std::ifstream in("/proc/self/net/dev");
  for (std::string line; std::getline(in, line);) {
    const std::size_t colon = line.find("eth0:");
    if (colon == std::string::npos) continue;
    std::istringstream numbers(line.substr(colon + 5));
    Traffic counted;
    double skipped = 0;
    numbers >> counted.received;
    for (int i = 0; i < 7; ++i) numbers >> skipped;
    numbers >> counted.sent;
    return counted;
  }
  return {};
}

class LinkLoad : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Hosts, LinkLoad, testing::Values(2, 4));

// A host needs the others' part of the sum and must give away its own: 2 (H-1)/H of the buffer each way, however many
// ranks it has.
TEST_P(LinkLoad, AllReduceSendsNoMoreThanItMust) {
  const int hosts = GetParam();
  run_ranks({.n = 2 * hosts, .as = As::netns, .hosts = hosts}, [hosts](Rank& r) {
    const double bytes = 16.0 * (1 << 20);
    const RegisteredMemory registered = r.world->allocate(static_cast<std::size_t>(bytes));
    std::vector<float> ordinary(registered.size() / sizeof(float));
    for (const Buffer buffer : {buffer_of(ordinary), buffer_of(registered.as<float>(ordinary.size()))}) {
      r.world->all_reduce(buffer);  // connections are open after this
      r.phase("before");
      const Traffic before = traffic();
      r.phase("counted");
      r.world->all_reduce(buffer);
      r.phase("after");
      const Traffic after = traffic();
      r.phase("counted again");
      const double allowed = 2.0 * (hosts - 1) / hosts * bytes * 1.06;  // frames, headers, acknowledgements
      EXPECT_GT(after.sent - before.sent, bytes / 2) << "the counter does not count";
      EXPECT_LE(after.sent - before.sent, allowed);
      EXPECT_LE(after.received - before.received, allowed);
    }
  });
}

TEST(Hosts, ShapedLinkCarriesCollectives) {
  run_ranks({.n = 4, .as = As::netns, .hosts = 2, .rate_mbit = 200}, [](Rank& r) {
    std::vector<std::int32_t> values(1 << 20, r.rank);
    r.world->all_reduce(buffer_of(values));
    EXPECT_EQ(values.front(), 6);
    EXPECT_EQ(values.back(), 6);
  });
}

}  // namespace
}  // namespace maniple::harness
