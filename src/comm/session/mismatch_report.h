// Collects each rank's call: for the error of a group whose ranks called different operations, and to compare the calls
// while a rank waits (call_watch.h). The failure detector's leader queries the ranks.
//
// Runs in the event loop's thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/net/event_loop.h"
#include "comm/session/detector_wire.h"

namespace maniple {

/// Whether the leader queries each rank's call before it passes an error on: for a mismatch, and for a timeout whose
/// awaited ranks are unknown. (NCCL compares nothing: ranks that call different operations wait for each other.)
inline bool asks_for_calls(const ErrorInfo& error, std::uint64_t seq) {
  return seq != 0 && (error.kind == ErrorKind::mismatch || (error.kind == ErrorKind::timeout && error.ranks.empty()));
}

/// The calls that `compare` compares.
struct ComparedCalls {
  std::vector<int> members;  ///< of the group, global ranks; empty: all ranks of the world
  bool arguments = true;     ///< false: only the operations
};
std::string encode(const ComparedCalls& compared);            ///< the text of a `compare` message
ComparedCalls decode_compared_calls(std::string_view bytes);  ///< throws ProtocolError

/// Whether two of the calls, made under one number, differ.
bool calls_differ(const std::vector<RankCall>& calls, bool arguments);

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
  /// Compares the calls for a waiting rank, at most some times a second for each group. An error results only if two of
  /// them differ: a rank that has not made the call is late. `others`: all other ranks.
  void compare(const DetectorMessage& question, const std::vector<int>& others);
  void answered(const DetectorMessage& answer);
  void stop();

 private:
  struct Query {
    std::uint64_t number = 0;
    bool compares = false;
    bool arguments = true;  // whether arguments are compared
    DetectorMessage abort;
    DetectorMessage request;
    std::map<int, RankCall> answers;
    std::set<int> awaited;
    std::set<int> pending;  // awaited ranks known to be in the group
  };
  struct Pace {  // of the comparisons of one call
    Deadline::Clock::time_point next{};
    Deadline::Duration pause{};
    bool scheduled = false;
  };
  void open(const DetectorMessage& abort, Query query);
  bool is_due(const DetectorMessage& question, const std::vector<int>& others);
  bool is_complete(const Query& query) const;
  void ask(const std::string& group, std::uint64_t number);
  void finish(const std::string& group);

  Callbacks callbacks_;
  std::uint64_t queries_ = 0;
  std::map<std::string, Query> open_;
  std::map<std::pair<std::string, std::uint64_t>, Pace> paces_;  // by group and number
};

}  // namespace maniple
