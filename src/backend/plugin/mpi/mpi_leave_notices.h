// What a rank says to the others when it leaves a group: how much it has sent to each. Who has received that much and waits for
// more waits in vain, and is told so at once instead of at its deadline.
//
// Farewells travel by a communicator of their own, which lives as long as the process: one that comes late must not be taken for
// a message of a later group.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "backend/plugin/mpi/mpi_runtime.h"

namespace maniple::mpi_engine {

constexpr std::size_t kLanes = 2;

/// Both directions between this rank and another one of the group. Each lane of it is used by one thread at a time.
struct Line {
  std::array<std::uint64_t, kLanes> sent{};  // bytes
  std::array<std::uint64_t, kLanes> received{};

  std::atomic<bool> left{false};  // the other one said farewell; what follows is written before
  std::array<std::uint64_t, kLanes> told{};
  Deadline limit;  // for what is on its way

  /// Throws SystemError when the other one has left, and all that it sent on this lane has come.
  void check(std::size_t lane) const;
};

/// The lines of a group on this rank.
class Party {
 public:
  /// `number`: of the group, the same on all its ranks; `world_ranks`: in MPI_COMM_WORLD.
  Party(std::uint64_t number, int rank, std::vector<int> world_ranks);
  ~Party();
  Party(const Party&) = delete;
  Party& operator=(const Party&) = delete;

  Line& line(int rank) { return lines_[static_cast<std::size_t>(rank)]; }
  /// To all others, without waiting.
  void say_farewell() const;

 private:
  friend class Farewells;
  void heard(int world_rank, const std::array<std::uint64_t, kLanes>& told);

  std::uint64_t number_;
  int rank_;
  std::vector<int> world_ranks_;
  std::vector<Line> lines_;
};

/// Those of all groups of this process.
class Farewells {
 public:
  static Farewells& get();

  bool open() const noexcept { return communicator_.load() != MPI_COMM_NULL; }
  /// A communicator of all ranks.
  void open_with(MPI_Comm communicator) { communicator_.store(communicator); }

  /// Takes in what has come. Any thread.
  void look();
  /// In all groups that are still there: the process ends.
  void say_all() noexcept;
  /// Those of the groups that this rank has left. MPICH complains at its end of messages that nobody took.
  void take_all(Deadline limit) noexcept;

 private:
  friend class Party;
  std::atomic<MPI_Comm> communicator_{MPI_COMM_NULL};
  std::mutex mutex_;  // of what follows
  std::map<std::uint64_t, Party*> parties_;
  std::atomic<long> due_{0};  // farewells of groups that this rank has left, still to come
};

}  // namespace maniple::mpi_engine
