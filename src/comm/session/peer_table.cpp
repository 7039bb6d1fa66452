#include "comm/session/peer_table.h"

#include <sys/random.h>

#include <fmt/format.h>

#include "comm/base/codec.h"
#include <maniple/comm/error.h>

namespace maniple {
namespace {

constexpr std::size_t kMostDescription = 512;
constexpr std::size_t kMostSettings = 1000;
constexpr std::size_t kMostSetting = 4096;
constexpr std::size_t kMostRefusal = std::size_t{1} << 20;
constexpr auto kLongestWaitToRefuse = std::chrono::seconds(10);

void put(ByteWriter& writer, const PeerInfo& peer) {
  writer.put_string(peer.host_key);
  writer.put_string(peer.host_name);
  writer.put(peer.pid);
  writer.put(peer.process);
  writer.put_string(peer.unix_address);
  writer.put_string(peer.tcp_address);
  writer.put_string(peer.cores.encode());
}

PeerInfo get_peer(ByteReader& reader) {
  PeerInfo peer;
  peer.host_key = reader.get_string(kMostDescription);
  peer.host_name = reader.get_string(kMostDescription);
  peer.pid = reader.get<std::int32_t>();
  peer.process = reader.get<std::uint64_t>();
  peer.unix_address = reader.get_string(kMostDescription);
  peer.tcp_address = reader.get_string(kMostDescription);
  peer.cores = CoreSet::decode(reader.get_string(CoreSet::kMostCores / 8));
  return peer;
}

/// Every rank refuses the list. Rank 0 returns when the others have refused it, too, or after a short limit: the store
/// may end with its process, before the others have read the list.
void wait_until_all_refused(Store& store, int rank, int world_size, Deadline deadline) {
  const auto key = [](int r) { return fmt::format("maniple/refused/{}", r); };
  try {
    store.set(key(rank), "");
    if (rank != 0) return;
    std::vector<std::string> keys;
    for (int r = 0; r < world_size; ++r) keys.push_back(key(r));
    store.multi_get(keys, Deadline::sooner(deadline, Deadline::after(kLongestWaitToRefuse)));
  } catch (const Error&) {
    // A rank or the store has ended already: no reason to wait.
  }
}

// Encodes the result of a round: the reason for refusal, or the table. The reason comes first, so that other versions
// can read it.
std::string table_of(const std::vector<std::string>& announcements) {
  PeerTable table;
  if (::getrandom(&table.world_id, sizeof table.world_id, 0) < 0) table.world_id = 0;
  std::vector<SettingsOf> all;
  for (std::size_t r = 0; r < announcements.size(); ++r) {
    Announcement announcement = decode_announcement(announcements[r]);
    all.push_back({announcement.peer.host_name, announcement.peer.describe(static_cast<int>(r)),
                   std::move(announcement.settings)});
    table.peers.push_back(std::move(announcement.peer));
  }
  if (table.world_id == 0 && !table.peers.empty()) table.world_id = table.peers.front().process;
  ByteWriter writer;
  writer.put_string(difference(all));
  writer.put_raw(encode(table));
  return writer.take();
}

}  // namespace

std::string PeerInfo::describe(int rank) const { return fmt::format("rank {} (pid {} on {})", rank, pid, host_name); }

std::string encode(const PeerTable& table) {
  ByteWriter writer;
  writer.put(table.world_id);
  writer.put(static_cast<std::uint32_t>(table.peers.size()));
  for (const PeerInfo& peer : table.peers) put(writer, peer);
  return writer.take();
}

PeerTable decode_peer_table(std::string_view bytes) {
  ByteReader reader(bytes);
  PeerTable table;
  table.world_id = reader.get<std::uint64_t>();
  const auto count = reader.get<std::uint32_t>();
  if (count > bytes.size()) throw ProtocolError("a list of ranks that claims more entries than it has bytes");
  for (std::uint32_t i = 0; i < count; ++i) table.peers.push_back(get_peer(reader));
  reader.expect_end();
  return table;
}

// The settings and the rank's identity come first and keep their format in all versions, as they are read before it is
// known whether the versions differ.
std::string encode(const Announcement& announcement) {
  ByteWriter writer;
  writer.put(static_cast<std::uint32_t>(announcement.settings.size()));
  for (const Setting& setting : announcement.settings) {
    writer.put_string(setting.name);
    writer.put_string(setting.value);
  }
  writer.put_string(announcement.peer.host_name);
  writer.put(announcement.peer.pid);
  put(writer, announcement.peer);
  return writer.take();
}

Announcement decode_announcement(std::string_view bytes) {
  ByteReader reader(bytes);
  Announcement announcement;
  const auto count = reader.get<std::uint32_t>();
  if (count > kMostSettings) throw ProtocolError(fmt::format("a rank with {} settings", count));
  for (std::uint32_t i = 0; i < count; ++i) {
    Setting setting;
    setting.name = reader.get_string(kMostSetting);
    setting.value = reader.get_string(kMostSetting);
    announcement.settings.push_back(std::move(setting));
  }
  announcement.peer.host_name = reader.get_string(kMostDescription);
  announcement.peer.pid = reader.get<std::int32_t>();
  if (!of_this_version(announcement.settings)) return announcement;  // the rest may have another format
  announcement.peer = get_peer(reader);
  reader.expect_end();
  return announcement;
}

MetPeers exchange_peers(const std::shared_ptr<Store>& store, int rank, int world_size, const Announcement& mine,
                        Deadline deadline) {
  const Met met = meet(store, {.rank = rank,
                               .world_size = world_size,
                               .announcement = encode(mine),
                               .combine = table_of,
                               .deadline = deadline});
  ByteReader reader(met.result);
  const std::string refusal(reader.get_string(kMostRefusal));
  if (!refusal.empty()) {
    wait_until_all_refused(*met.store, rank, world_size, deadline);
    throw InvalidArgument("init: " + refusal);
  }
  MetPeers peers{decode_peer_table(reader.get_raw(reader.left())), met.store};
  if (static_cast<int>(peers.table.peers.size()) != world_size) {
    throw ProtocolError(
        fmt::format("rank 0 listed {} ranks, this rank expects {}", peers.table.peers.size(), world_size));
  }
  return peers;
}

}  // namespace maniple
