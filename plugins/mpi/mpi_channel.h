// A byte channel over MPI's point-to-point messages: one tag, packets of up to 64 KiB, copied on both sides. MPI thus
// never holds the caller's memory, and a message can be abandoned at any moment.
//
// A rank that leaves a group sends every other rank a *leave notice* with the number of bytes it has sent to that rank.
// A rank that has received them all and waits for more gets an error at once instead of at its deadline. Notices use a
// separate communicator that exists as long as the process, so that a late notice is not taken for a message of a later
// group.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "comm/base/mutex.h"
#include "plugins/mpi/mpi_runtime.h"

namespace maniple::mpi_plugin {

/// The bytes sent to and received from another rank of the group, and its leave notice. One thread at a time uses the
/// counters of each traffic.
struct PeerCounters {
  std::array<std::uint64_t, kTrafficCount> sent{};  // bytes
  std::array<std::uint64_t, kTrafficCount> received{};

  std::atomic<bool> left{false};  // the other rank's notice has arrived; set after the fields below
  std::array<std::uint64_t, kTrafficCount> announced{};
  Deadline limit;  // for bytes in transit

  /// Throws SystemError when the other rank has left and all its bytes of this traffic have arrived.
  void check(std::size_t traffic) const;
};

/// The counters of a group on this rank.
class GroupPeers {
 public:
  /// `number` identifies the group on all its ranks; `world_ranks` are its ranks in MPI_COMM_WORLD.
  GroupPeers(std::uint64_t number, int rank, std::vector<int> world_ranks);
  ~GroupPeers();
  GroupPeers(const GroupPeers&) = delete;
  GroupPeers& operator=(const GroupPeers&) = delete;

  PeerCounters& counters(int rank) { return counters_[static_cast<std::size_t>(rank)]; }
  /// Sends notices to all other ranks, without waiting.
  void send_leave_notices() const;

 private:
  friend class LeaveNotices;
  void on_notice(int world_rank, const std::array<std::uint64_t, kTrafficCount>& announced);

  std::uint64_t number_;
  int rank_;
  std::vector<int> world_ranks_;
  std::vector<PeerCounters> counters_;
};

/// The leave notices of all groups of this process.
class LeaveNotices {
 public:
  static LeaveNotices& get();

  bool open() const noexcept { return communicator_.load() != MPI_COMM_NULL; }
  /// `communicator` contains all ranks.
  void open_with(MPI_Comm communicator) { communicator_.store(communicator); }

  /// Receives the notices that have arrived. Any thread.
  void poll();
  /// Sends notices in all groups that still exist. Call when the process ends.
  void send_all() noexcept;
  /// Waits for the notices of groups that this rank has left: MPICH warns at exit about messages not received.
  void receive_all(Deadline limit) noexcept;

 private:
  friend class GroupPeers;
  std::atomic<MPI_Comm> communicator_{MPI_COMM_NULL};
  Mutex mutex_;
  std::map<std::uint64_t, GroupPeers*> groups_ MANIPLE_GUARDED_BY(mutex_);
  std::atomic<long> due_{0};  // outstanding notices of groups that this rank has left
};

/// The other end of a channel.
struct Endpoint {
  MPI_Comm communicator = MPI_COMM_NULL;
  int peer = 0;
  int tag = 0;
  PeerCounters& counters;
  std::size_t traffic = 0;
};

std::unique_ptr<ByteSink> make_sink(const Endpoint& endpoint);
std::unique_ptr<ByteSource> make_source(const Endpoint& endpoint);

}  // namespace maniple::mpi_plugin
