#include "comm/session/peer_table.h"

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

Announcement announcement_of(int rank) { return {peer_of(rank), settings_of_this_rank({})}; }

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

TEST(PeerTable, EveryRankLearnsOfAllOthers) {
  constexpr int kRanks = 5;
  const auto store = make_memory_store();
  std::vector<PeerTable> tables(kRanks);
  std::vector<std::thread> ranks;
  for (int r = 0; r < kRanks; ++r) {
    ranks.emplace_back([&, r] {
      tables[static_cast<std::size_t>(r)] = exchange_peers(store, r, kRanks, announcement_of(r), soon()).table;
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const PeerTable& table : tables) {
    EXPECT_EQ(table.world_id, tables[0].world_id);
    ASSERT_EQ(table.peers.size(), std::size_t{kRanks});
    for (int r = 0; r < kRanks; ++r) expect_same(table.peers[static_cast<std::size_t>(r)], peer_of(r));
  }
}

TEST(PeerTable, AnnouncementsComeBackAsTheyWere) {
  const Announcement announcement{peer_of(3), settings_of_this_rank({})};
  const std::string bytes = encode(announcement);
  const Announcement again = decode_announcement(bytes);
  expect_same(again.peer, announcement.peer);
  ASSERT_EQ(again.settings.size(), announcement.settings.size());
  for (std::size_t i = 0; i < again.settings.size(); ++i) {
    EXPECT_EQ(again.settings[i].name, announcement.settings[i].name);
    EXPECT_EQ(again.settings[i].value, announcement.settings[i].value);
  }
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW(decode_announcement(bytes.substr(0, size)), ProtocolError) << size;
  }
  EXPECT_THROW(decode_announcement(bytes + '\0'), ProtocolError);
}

// All ranks get the same text, whatever follows the settings in the announcement of another version.
TEST(PeerTable, AnotherVersionIsRefusedByAll) {
  const auto store = make_memory_store();
  std::vector<std::string> texts(2);
  std::vector<std::thread> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.emplace_back([&, r] {
      Announcement mine = announcement_of(r);
      if (r == 1) mine.settings[0].value = "9.9.9";
      try {
        exchange_peers(store, r, 2, mine, soon());
      } catch (const InvalidArgument& error) {
        texts[static_cast<std::size_t>(r)] = error.what();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_THAT(texts[0], HasSubstr("init: the version of Maniple is "));
  EXPECT_THAT(texts[0], HasSubstr("but 9.9.9 on rank 1 (pid 4001 on node0); it must be alike on all ranks"));
  EXPECT_EQ(texts[0], texts[1]);
}

}  // namespace
}  // namespace maniple
