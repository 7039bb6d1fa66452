// Collects each rank's call for the error of a group whose ranks called different operations. The failure detector's
// leader queries them all.
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

/// Whether the leader queries each rank's call before it passes an error on: for a mismatch, and for a timeout whose
/// awaited ranks are unknown. (NCCL compares nothing: ranks that call different operations wait for each other.)
inline bool asks_for_calls(const ErrorInfo& error, std::uint64_t seq) {
  return seq != 0 && (error.kind == ErrorKind::mismatch || (error.kind == ErrorKind::timeout && error.ranks.empty()));
}

class MismatchReports : public std::enable_shared_from_this<MismatchReports> {
 public:
  struct Callbacks {
    std::shared_ptr<EventLoop> loop;
    int rank = 0;
    /// Returns this rank's call; empty if it has not called yet; rank -1 if it is not in the group.
    std::function<RankCall(const std::string& group, std::uint64_t seq)> called;
    std::function<void(int rank, const DetectorMessage& message)> send;
    std::function<void(const DetectorMessage& abort)> finished;  ///< with the replies in its error
  };
  explicit MismatchReports(Callbacks callbacks) : callbacks_(std::move(callbacks)) {}

  /// Whether a query about a reported error is open.
  bool is_open(const std::string& group) const {
    const auto it = open_.find(group);
    return it != open_.end() && !it->second.compares;
  }
  void begin(const DetectorMessage& abort, const std::vector<int>& others);
  /// Checks the calls for a waiting rank: an error results only if others called a different operation. (Arguments may
  /// differ, as each rank may have counts of its own.)
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
    std::set<int> pending;  // awaited ranks known to be in the group
  };
  void open(const DetectorMessage& abort, const std::vector<int>& others, bool compares);
  void ask(const std::string& group, std::uint64_t number);
  void finish(const std::string& group);

  Callbacks callbacks_;
  std::uint64_t queries_ = 0;
  std::map<std::string, Query> open_;
};

}  // namespace maniple
