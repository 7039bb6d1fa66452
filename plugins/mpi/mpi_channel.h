// A channel of bytes over MPI's point-to-point messages: one tag, packets of up to 64 KiB, copied on both sides. So MPI
// never holds memory of the caller, and a message can be given up at any moment.
//
// A rank that leaves a group sends each other rank a *leave notice*: how much it has sent to that rank. A rank that has
// received that much and waits for more gets an error at once instead of at its deadline. Notices travel by a
// communicator of their own, which lives as long as the process: one that arrives late must not be taken for a message
// of a later group.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "comm/base/mutex.h"
#include "plugins/mpi/mpi_runtime.h"

namespace maniple::mpi_plugin {

/// What was sent to and received from another rank of the group, and its leave notice. Those of each traffic are used
/// by one thread at a time.
struct PeerCounters {
  std::array<std::uint64_t, kTrafficCount> sent{};  // bytes
  std::array<std::uint64_t, kTrafficCount> received{};

  std::atomic<bool> left{false};  // the other rank's notice has arrived; what follows is written before
  std::array<std::uint64_t, kTrafficCount> announced{};
  Deadline limit;  // for what is in transit

  /// Throws SystemError when the other rank has left, and all that it sent of this traffic has arrived.
  void check(std::size_t traffic) const;
};

/// The counters of a group on this rank.
class GroupPeers {
 public:
  /// `number`: of the group, the same on all its ranks; `world_ranks`: in MPI_COMM_WORLD.
  GroupPeers(std::uint64_t number, int rank, std::vector<int> world_ranks);
  ~GroupPeers();
  GroupPeers(const GroupPeers&) = delete;
  GroupPeers& operator=(const GroupPeers&) = delete;

  PeerCounters& counters(int rank) { return counters_[static_cast<std::size_t>(rank)]; }
  /// To all others, without waiting.
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
  /// A communicator of all ranks.
  void open_with(MPI_Comm communicator) { communicator_.store(communicator); }

  /// Receives those that have arrived. Any thread.
  void poll();
  /// In all groups that still exist: the process ends.
  void send_all() noexcept;
  /// Waits for those of the groups that this rank has left: MPICH warns at exit of messages that were not received.
  void receive_all(Deadline limit) noexcept;

 private:
  friend class GroupPeers;
  std::atomic<MPI_Comm> communicator_{MPI_COMM_NULL};
  Mutex mutex_;
  std::map<std::uint64_t, GroupPeers*> groups_ MANIPLE_GUARDED_BY(mutex_);
  std::atomic<long> due_{0};  // notices still to arrive, of groups that this rank has left
};

/// Where a channel leads to, or comes from.
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
