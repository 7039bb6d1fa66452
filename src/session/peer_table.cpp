#include "session/peer_table.h"

#include <sys/random.h>

#include <fmt/format.h>

#include "base/check.h"
#include "base/codec.h"

namespace maniple {
namespace {

constexpr std::size_t kMostDescription = 512;
constexpr auto kLongestWaitToRefuse = std::chrono::seconds(10);

void put(ByteWriter& writer, const PeerInfo& peer) {
  writer.put_string(peer.host_key);
  writer.put_string(peer.host_name);
  writer.put(peer.pid);
  writer.put(peer.process);
  writer.put_string(peer.unix_address);
  writer.put_string(peer.tcp_address);
  writer.put_string(peer.cores.encode());
  writer.put(static_cast<std::uint8_t>(peer.encrypts ? 1 : 0));
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
  const auto encrypts = reader.get<std::uint8_t>();
  if (encrypts > 1) throw ProtocolError(fmt::format("a rank that encrypts in an unknown way {}", encrypts));
  peer.encrypts = encrypts == 1;
  return peer;
}

std::string key_of(int rank) { return fmt::format("maniple/peer/{}", rank); }
constexpr const char* kTableKey = "maniple/peers";

[[noreturn]] void throw_missing(Store& store, int world_size, Deadline::Clock::time_point since,
                                const Timeout& original) {
  const double waited = std::chrono::duration<double>(Deadline::Clock::now() - since).count();
  std::vector<std::string> keys;
  for (int r = 0; r < world_size; ++r) keys.push_back(key_of(r));
  std::vector<int> missing;
  try {
    const std::vector<bool> there = store.check(keys);
    for (int r = 0; r < world_size; ++r) {
      if (!there[static_cast<std::size_t>(r)]) missing.push_back(r);
    }
  } catch (const Error&) {
    throw original;
  }
  if (missing.empty()) {
    throw Timeout(
        fmt::format("all {} ranks joined, but rank 0 did not complete the list of ranks in time", world_size));
  }
  const std::string text = fmt::format(
      "timed out after {:.1f} s: {} of {} ranks joined, waiting for rank{} {}. Was every rank started, with the same "
      "address ({})?",
      waited, world_size - static_cast<int>(missing.size()), world_size, missing.size() == 1 ? "" : "s",
      list_ranks(missing), store.describe());
  throw Timeout(text, std::move(missing), waited);
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

PeerTable exchange_peers(Store& store, int rank, int world_size, const PeerInfo& mine, Deadline deadline) {
  ByteWriter writer;
  put(writer, mine);
  const auto since = Deadline::Clock::now();
  store.set(key_of(rank), writer.bytes());
  try {
    if (rank == 0) {
      // One rank collects and all others read one value, so the store answers 2n requests and not n^2.
      std::vector<std::string> keys;
      for (int r = 0; r < world_size; ++r) keys.push_back(key_of(r));
      PeerTable table;
      if (::getrandom(&table.world_id, sizeof table.world_id, 0) < 0) table.world_id = mine.process;
      for (const std::string& bytes : store.multi_get(keys, deadline)) {
        ByteReader reader(bytes);
        table.peers.push_back(get_peer(reader));
      }
      store.set(kTableKey, encode(table));
      return table;
    }
    PeerTable table = decode_peer_table(store.get(kTableKey, deadline));
    if (static_cast<int>(table.peers.size()) != world_size) {
      throw ProtocolError(fmt::format("rank 0 listed {} ranks, this rank expects {}", table.peers.size(), world_size));
    }
    return table;
  } catch (const Timeout& timeout) {
    throw_missing(store, world_size, since, timeout);
  }
}

void wait_until_all_refused(Store& store, int rank, int world_size, Deadline deadline) {
  const auto key = [](int r) { return fmt::format("maniple/refused/{}", r); };
  try {
    store.set(key(rank), "");
    if (rank != 0) return;
    std::vector<std::string> keys;
    for (int r = 0; r < world_size; ++r) keys.push_back(key(r));
    store.multi_get(keys, Deadline::sooner(deadline, Deadline::after(kLongestWaitToRefuse)));
  } catch (const Error&) {
    // A rank has ended already, or the store has: there is nobody to wait for.
  }
}

std::string list_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) ++j;
    if (!text.empty()) text += ", ";
    text += j > i + 1 ? fmt::format("{}-{}", ranks[i], ranks[j]) : fmt::format("{}", ranks[i]);
    if (j == i + 1) text += fmt::format(", {}", ranks[j]);
    i = j + 1;
  }
  return text;
}

}  // namespace maniple
