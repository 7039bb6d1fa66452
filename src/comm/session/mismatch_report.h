// What each rank called, for the error of a group whose ranks called different things: the leader of the failure
// detector asks them all.
//
// Runs in the event loop's thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "comm/net/event_loop.h"
#include "comm/session/detector_wire.h"

namespace maniple {

/// Whether the leader asks what each rank called before it passes an error on: of ranks that called different things,
/// and of a call that timed out where nobody knows for whom it waited. (NCCL compares nothing: ranks that call
/// different things wait for each other.)
inline bool asks_for_calls(const ErrorInfo& error, std::uint64_t seq) {
  return seq != 0 && (error.kind == ErrorKind::mismatch || (error.kind == ErrorKind::timeout && error.ranks.empty()));
}

class MismatchReports : public std::enable_shared_from_this<MismatchReports> {
 public:
  struct Callbacks {
    std::shared_ptr<EventLoop> loop;
    int rank = 0;
    /// By this rank; an empty call: nothing yet; rank -1: not of the group.
    std::function<RankCall(const std::string& group, std::uint64_t seq)> called;
    std::function<void(int rank, const DetectorMessage& message)> send;
    std::function<void(const DetectorMessage& abort)> finished;  ///< with the answers in its error
  };
  explicit MismatchReports(Callbacks callbacks) : callbacks_(std::move(callbacks)) {}

  /// About an error that was reported.
  bool is_open(const std::string& group) const {
    const auto it = open_.find(group);
    return it != open_.end() && !it->second.compares;
  }
  void begin(const DetectorMessage& abort, const std::vector<int>& others);
  /// For a rank that waits: only if others have called another operation there is an error. (Arguments may differ where
  /// each rank has its own counts.)
  void compare(const DetectorMessage& question, const std::vector<int>& others);
  void answered(const DetectorMessage& answer);
  void stop() { open_.clear(); }

 private:
  struct Query {
    std::uint64_t number = 0;
    bool compares = false;
    DetectorMessage abort;
    DetectorMessage request;
    std::map<int, RankCall> answers;
    std::set<int> awaited;
    std::set<int> pending;  // of the awaited: known to be of the group
  };
  void open(const DetectorMessage& abort, const std::vector<int>& others, bool compares);
  void ask(const std::string& group, std::uint64_t number);
  void finish(const std::string& group);

  Callbacks callbacks_;
  std::uint64_t queries_ = 0;
  std::map<std::string, Query> open_;
};

}  // namespace maniple
