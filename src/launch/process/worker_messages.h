// Receives the messages that this host's ranks send to the launcher through an inherited socket: that they wait in
// init(), that all ranks are connected (comm/rendezvous/rendezvous.h), and why they failed (comm/base/error_codec.h).
// Programs that do not use Maniple send nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/base/error_codec.h"
#include "comm/base/unique_fd.h"

namespace maniple::launch {

/// What a worker of an elastic job reports; see elastic_members.h.
struct WorkerNotice {
  enum class Kind : std::uint8_t { ready, joined, leaving, lost };
  Kind kind = Kind::ready;
  int rank = 0;                  ///< the worker's number
  std::uint32_t generation = 0;  ///< for lost
  std::vector<int> lost = {};    ///< ranks of that generation
  friend bool operator==(const WorkerNotice&, const WorkerNotice&) = default;
};

class WorkerMessages {
 public:
  /// Clears all state and opens a new socket for the next ranks. Throws SystemError.
  void open();
  /// The end that ranks inherit, for MANIPLE_INIT_FD and MANIPLE_REPORT_FD; close-on-exec here. -1: not open.
  int rank_end() const noexcept { return rank_end_.get(); }
  /// Readable when there is a message; non-blocking. -1: not open.
  int own_end() const noexcept { return own_end_.get(); }
  /// Call after all ranks were started, so that only they hold the other end.
  void close_rank_end() noexcept { rank_end_.reset(); }
  void close() noexcept;

  /// Receives all pending messages. False when no more can come because all senders have ended.
  bool receive();

  bool is_initialised(int rank) const { return initialised_.count(rank) != 0; }
  /// A rank that waits in init() for all ranks of the job.
  std::optional<int> waiting() const;
  /// The failure that the rank reported; of several, the last that does not follow from an earlier one (follows_from).
  /// Null: none.
  const ErrorInfo* failure_of(int rank) const;
  /// The ranks whose failure_of() has changed since the last call.
  std::set<int> take_reporters() { return std::exchange(reporters_, {}); }
  std::vector<WorkerNotice> take_notices() { return std::exchange(notices_, {}); }
  /// Forgets the rank's process, which another one replaces.
  void forget(int rank);

 private:
  struct Failure {
    ErrorInfo error;
    std::chrono::steady_clock::time_point when;
  };
  void take(std::string_view message);
  void take_failure(int rank, ErrorInfo error);

  UniqueFd own_end_, rank_end_;
  std::set<int> waiting_, initialised_, reporters_;
  std::map<int, Failure> failures_;
  std::vector<WorkerNotice> notices_;
};

}  // namespace maniple::launch
