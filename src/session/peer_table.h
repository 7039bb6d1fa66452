// Who the ranks of the world are and how to reach them, exchanged once through the store.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/host.h"
#include <maniple/comm/deadline.h>
#include <maniple/comm/store.h>

namespace maniple {

struct PeerInfo {
  std::string host_key;  ///< see HostIdentity
  std::string host_name;
  std::int32_t pid = 0;
  std::uint64_t process = 0;  ///< random, drawn once per process: tells threads of one process from a reused pid
  std::string unix_address;   ///< for shared memory
  std::string tcp_address;    ///< for data and control
  CoreSet cores;              ///< that it may run on
  bool encrypts = false;      ///< data, MANIPLE_ENCRYPT

  std::string describe(int rank) const;  ///< "rank 3 (pid 4711 on node7)"
};

struct PeerTable {
  std::uint64_t world_id = 0;  ///< random, drawn by rank 0: tells this world from others in the same process
  std::vector<PeerInfo> peers;
};

std::string encode(const PeerTable& table);
PeerTable decode_peer_table(std::string_view bytes);

/// Announces `mine` and waits for everybody. Throws Timeout "timed out after 60.0 s: 6 of 8 ranks joined, waiting for
/// ranks 3, 5".
PeerTable exchange_peers(Store& store, int rank, int world_size, const PeerInfo& mine, Deadline deadline);

/// For a list that every rank refuses: rank 0 returns when the others have refused it too, and not much later if they never do, because
/// the store may end with its process, before they have read the list.
void wait_until_all_refused(Store& store, int rank, int world_size, Deadline deadline);

/// "3, 5-7, 9"
std::string list_ranks(const std::vector<int>& ranks);

}  // namespace maniple
