// The identities and addresses of the world's ranks, exchanged once through the store.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/base/host.h"
#include "comm/rendezvous/round.h"
#include "comm/session/settings.h"
#include <maniple/comm/deadline.h>
#include <maniple/comm/store.h>

namespace maniple {

struct PeerInfo {
  std::string host_key;  ///< see HostIdentity
  std::string host_name;
  std::int32_t pid = 0;
  /// Random, drawn once per process: distinguishes threads of one process from a reused pid.
  std::uint64_t process = 0;
  std::string unix_address;  ///< for shared memory
  std::string tcp_address;   ///< for data and control
  CoreSet cores;             ///< cores the process may run on

  std::string describe(int rank) const;  ///< "rank 3 (pid 4711 on node7)"
};

struct PeerTable {
  std::uint64_t world_id = 0;  ///< random, drawn by rank 0: distinguishes worlds in one process
  std::vector<PeerInfo> peers;
};

std::string encode(const PeerTable& table);
PeerTable decode_peer_table(std::string_view bytes);

/// A rank's entry in the store: its identity, and the settings that must be alike on all ranks.
struct Announcement {
  PeerInfo peer;
  Settings settings;
};
std::string encode(const Announcement& announcement);
Announcement decode_announcement(std::string_view bytes);

struct MetPeers {
  PeerTable table;
  std::shared_ptr<Store> store;  ///< holds only this world's keys
};
/// Announces `mine` and waits for all ranks (see meet). Throws InvalidArgument on all ranks if settings differ.
MetPeers exchange_peers(const std::shared_ptr<Store>& store, int rank, int world_size, const Announcement& mine,
                        Deadline deadline);

}  // namespace maniple
