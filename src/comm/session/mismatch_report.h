// Collects each rank's call: for the error of a group whose ranks called different operations, and to compare the calls
// while a rank waits (call_watch.h). The failure detector's leader queries the ranks.
//
// A part of the detector's core: events and the time go in, effects come out.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/session/detector_effect.h"

namespace maniple {

/// Whether the leader queries each rank's call before it passes an error on: for a mismatch, and for a timeout whose
/// awaited ranks are unknown. (NCCL compares nothing: ranks that call different operations wait for each other.)
inline bool asks_for_calls(const ErrorInfo& error, std::uint64_t seq) {
  return seq != 0 && (error.kind == ErrorKind::mismatch || (error.kind == ErrorKind::timeout && error.ranks.empty()));
}

/// Whether two of the calls, made under one number, differ. `arguments` false: only the operations are compared.
bool calls_differ(const std::vector<RankCall>& calls, bool arguments);

namespace detector {

class MismatchReports {
 public:
  explicit MismatchReports(int rank) : rank_(rank) {}

  /// Whether a query about a reported error is open.
  bool is_open(const std::string& group) const {
    const auto it = open_.find(group);
    return it != open_.end() && !it->second.compares;
  }
  void begin(const Abort& abort, const std::vector<int>& others, Time now, Effects& effects);
  /// Compares the calls for a waiting rank, at most some times a second for each group. An error results only if two of
  /// them differ: a rank that has not made the call is late. `others`: all other ranks.
  void compare(const Compare& question, const std::vector<int>& others, Time now, Effects& effects);
  /// The reply of a rank, this one included. An empty call: it is in the group but has not made the call yet.
  void answered(const QueryCall& query, RankCall call);
  /// The rank is gone: its reply is not awaited any more.
  void forget(int rank);
  /// Ends and repeats queries whose time has come, and begins comparisons that had to wait.
  void wake(const std::vector<int>& others, Time now, Effects& effects);
  std::optional<Time> due() const;
  /// The errors that have become ready, with the replies in them.
  std::vector<Abort> take_finished() { return std::exchange(finished_, {}); }
  void stop();

 private:
  struct Query {
    bool compares = false;
    bool arguments = true;  // whether arguments are compared
    Abort abort = {};
    std::map<int, RankCall> answers = {};
    std::set<int> awaited = {};
    std::set<int> pending = {};  // awaited ranks known to be in the group
    std::optional<Time> ask_at = {};
    Time until{};
  };
  struct Pace {  // of the comparisons of one call
    Time next{};
    Clock::duration pause{};
    std::optional<Compare> scheduled = {};
  };
  using Open = std::map<std::string, Query>;
  void open(Query query, Time now, Effects& effects);
  bool is_due(const Compare& question, Time now);
  static bool is_complete(const Query& query);
  void ask(Query& query, Time now, Effects& effects) const;
  Open::iterator finish(Open::iterator it);

  int rank_;
  Open open_;
  std::map<std::pair<std::string, std::uint64_t>, Pace> paces_;  // by group and number
  std::vector<Abort> finished_;
};

}  // namespace detector
}  // namespace maniple
