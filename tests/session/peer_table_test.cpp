#include "session/peer_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

using testing::HasSubstr;

Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

PeerInfo peer_of(int rank) {
  return {.host_key = "boot " + std::to_string(rank / 2),
          .host_name = "node" + std::to_string(rank / 2),
          .pid = 4000 + rank,
          .process = 0xfedcba9876543210ULL + static_cast<unsigned>(rank),
          .unix_address = "unix:@maniple-" + std::to_string(rank),
          .tcp_address = "10.0.0.1:" + std::to_string(1000 + rank),
          .cores = CoreSet::of({rank, 100})};
}

void expect_same(const PeerInfo& a, const PeerInfo& b) {
  EXPECT_EQ(a.host_key, b.host_key);
  EXPECT_EQ(a.host_name, b.host_name);
  EXPECT_EQ(a.pid, b.pid);
  EXPECT_EQ(a.process, b.process);
  EXPECT_EQ(a.unix_address, b.unix_address);
  EXPECT_EQ(a.tcp_address, b.tcp_address);
  EXPECT_EQ(a.cores, b.cores);
}

TEST(PeerTable, ComesBackAsItWas) {
  const PeerTable table{.world_id = 0x0123456789abcdefULL, .peers = {peer_of(0), peer_of(1), {}}};
  const PeerTable again = decode_peer_table(encode(table));
  EXPECT_EQ(again.world_id, table.world_id);
  ASSERT_EQ(again.peers.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) expect_same(again.peers[i], table.peers[i]);
  EXPECT_TRUE(decode_peer_table(encode(PeerTable{})).peers.empty());
}

TEST(PeerTable, BrokenOnesAreRefused) {
  const std::string bytes = encode(PeerTable{.world_id = 1, .peers = {peer_of(0), peer_of(1)}});
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW(decode_peer_table(bytes.substr(0, size)), ProtocolError) << size;
  }
  EXPECT_THROW(decode_peer_table(bytes + '\0'), ProtocolError);
  std::string claims = bytes;
  for (std::size_t i = 8; i < 12; ++i) claims[i] = '\xff';  // the number of entries
  EXPECT_THROW(decode_peer_table(claims), ProtocolError);
}

TEST(PeerTable, ErrorsNameARankByItsProcessAndHost) { EXPECT_EQ(peer_of(3).describe(3), "rank 3 (pid 4003 on node1)"); }

TEST(PeerTable, ListsOfRanksAreShort) {
  EXPECT_EQ(list_ranks({}), "");
  EXPECT_EQ(list_ranks({4}), "4");
  EXPECT_EQ(list_ranks({3, 5}), "3, 5");
  EXPECT_EQ(list_ranks({3, 4}), "3, 4");
  EXPECT_EQ(list_ranks({3, 5, 6, 7, 9}), "3, 5-7, 9");
  EXPECT_EQ(list_ranks({0, 1, 2, 3}), "0-3");
}

TEST(PeerTable, EveryRankLearnsOfAllOthers) {
  constexpr int kRanks = 5;
  const auto store = make_memory_store();
  std::vector<PeerTable> tables(kRanks);
  std::vector<std::thread> ranks;
  for (int r = 0; r < kRanks; ++r) {
    ranks.emplace_back(
        [&, r] { tables[static_cast<std::size_t>(r)] = exchange_peers(*store, r, kRanks, peer_of(r), soon()); });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const PeerTable& table : tables) {
    EXPECT_EQ(table.world_id, tables[0].world_id);
    ASSERT_EQ(table.peers.size(), std::size_t{kRanks});
    for (int r = 0; r < kRanks; ++r) expect_same(table.peers[static_cast<std::size_t>(r)], peer_of(r));
  }
}

std::string timeout_text(Store& store, int rank, int world_size) {
  try {
    exchange_peers(store, rank, world_size, peer_of(rank), Deadline::after(std::chrono::milliseconds(20)));
  } catch (const Timeout& timeout) {
    return timeout.what();
  }
  return "no timeout";
}

TEST(PeerTable, WhoHasNotComeIsNamed) {
  const auto store = make_memory_store();
  EXPECT_THAT(timeout_text(*store, 5, 8), HasSubstr("1 of 8 ranks joined, waiting for ranks 0-4, 6, 7"));
  EXPECT_THAT(timeout_text(*store, 0, 8), HasSubstr("2 of 8 ranks joined, waiting for ranks 1-4, 6, 7"));
  for (int r = 1; r < 7; ++r) timeout_text(*store, r, 8);
  EXPECT_THAT(timeout_text(*store, 0, 8), HasSubstr("7 of 8 ranks joined, waiting for rank 7. Was"));
}

TEST(PeerTable, AnotherWorldSizeIsAnError) {
  const auto store = make_memory_store();
  exchange_peers(*store, 0, 1, peer_of(0), soon());
  EXPECT_THROW(exchange_peers(*store, 1, 2, peer_of(1), soon()), ProtocolError);
}

}  // namespace
}  // namespace maniple
