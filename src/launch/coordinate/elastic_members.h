// Which workers of an elastic job form its next generation, and when a lost worker is replaced (`maniple run
// --elastic`; docs/elastic.md). Pure: a part of the coordinator.
//
//   starting   the process runs and has not asked for a group yet
//   ready      it is a member, or waits for the next generation
//   lost       it failed; a replacement starts at `replace_at`, unless the job gives it up
//   left       it left in good order, and is not replaced
//   done       its program has ended with 0: the training is over, so nothing is replaced any more, and workers that
//              had not joined yet are ended
//
// A generation is formed at once when a member is lost. New workers join when the previous generation has met, so that
// they do not disturb one that is still forming.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "launch/coordinate/policies.h"
#include "launch/process/failure_report.h"

namespace maniple::launch {

namespace members {

/// `members`: worker numbers in the order of their ranks; members of the previous generation come first.
struct Form {
  std::uint32_t generation;
  std::vector<int> members;
};
/// `joins_late`: a generation was formed, so the new process joins it while it runs.
struct Replace {
  int worker;
  bool joins_late;
};
struct Kill {
  int worker;
};
struct Print {
  std::string text;
};
/// The job cannot go on.
struct End {
  int code;
};

}  // namespace members
using MemberAction = std::variant<members::Form, members::Replace, members::Kill, members::Print, members::End>;
using MemberActions = std::vector<MemberAction>;

class ElasticMembers {
 public:
  using Time = std::chrono::duration<double>;

  /// A worker that fails this often in a row, each time within kStable of its start, is given up.
  static constexpr int kMaxQuickFailures = 5;
  static constexpr Time kStable{60.0};

  ElasticMembers(ElasticRange range, RestartPolicy policy, Time join_timeout)
      : range_(range), policy_(policy), join_timeout_(join_timeout) {}

  void begin(int workers, Time now);
  // What happened. `now` never goes back.
  MemberActions on_ready(int worker, Time now);
  MemberActions on_joined(int worker, Time now);
  MemberActions on_exit(const RankExit& exit, Time now);
  MemberActions on_leaving(int worker, Time now);
  /// A worker reports that ranks of its generation do not respond.
  MemberActions on_lost(int worker, std::uint32_t generation, const std::vector<int>& ranks, Time now);
  MemberActions on_time(Time now);
  std::optional<Time> next_timer() const;

  std::uint32_t generation() const noexcept { return generation_; }
  /// The workers of the current generation, in the order of their ranks; some may be lost.
  const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  enum class State { starting, ready, lost, left, done };
  struct Worker {
    State state = State::starting;
    bool leaving = false;
    int quick_failures = 0;
    Time started{0};
    std::optional<Time> replace_at = {};
  };
  void check(Time now);
  void end_late_workers();
  void drop(int worker);
  bool is_member(int worker) const { return std::find(members_.begin(), members_.end(), worker) != members_.end(); }
  bool lives(int worker) const { return at(worker).state == State::ready; }
  Worker& at(int worker) { return workers_.at(static_cast<std::size_t>(worker)); }
  const Worker& at(int worker) const { return workers_.at(static_cast<std::size_t>(worker)); }
  bool knows(int worker) const { return worker >= 0 && worker < static_cast<int>(workers_.size()); }
  void print(std::string text) { actions_.emplace_back(members::Print{std::move(text)}); }
  MemberActions take() { return std::exchange(actions_, {}); }

  ElasticRange range_;
  RestartPolicy policy_;
  Time join_timeout_;
  std::vector<Worker> workers_;
  std::uint32_t generation_ = 0;
  std::vector<int> ranks_;             // the workers of the current generation, in rank order
  std::vector<int> members_;           // without workers that are lost or have left
  bool broken_ = false;                // the current generation has lost a member
  std::set<int> joined_;               // members that have met the others
  std::set<int> met_;                  // members of the last generation that has met
  bool finishing_ = false;             // a worker is done
  std::optional<Time> waiting_until_;  // too few workers
  int code_ = 1;                       // of the last failure
  MemberActions actions_;
};

}  // namespace maniple::launch
