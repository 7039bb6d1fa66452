// Which workers of an elastic job form its next generation, when a lost worker is replaced, and on which nodes workers
// run (`maniple run --elastic`; docs/elastic.md). Pure: a part of the coordinator.
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
//
// A worker keeps its number while its process is replaced. The workers of a node that is lost are not replaced; a node
// that joins brings workers of its own.
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
/// Start a process. `joins_late`: a generation was formed, so the new process joins it while it runs.
struct Replace {
  int worker;
  bool joins_late;
};
/// Ask a worker to leave after its step.
struct Ask {
  int worker;
};
struct Kill {
  int worker;
};
struct Print {
  std::string text;
};
/// The job cannot go on. Members of a generation that was formed just before save what they have.
struct End {
  int code;
};
/// All workers have ended in good order.
struct Finish {};

}  // namespace members
using MemberAction = std::variant<members::Form, members::Replace, members::Ask, members::Kill, members::Print,
                                  members::End, members::Finish>;
using MemberActions = std::vector<MemberAction>;

class ElasticMembers {
 public:
  using Time = std::chrono::duration<double>;

  /// A worker that fails this often in a row, each time within kStable of its start, is given up.
  static constexpr int kMaxQuickFailures = 5;
  static constexpr Time kStable{60.0};
  /// The job ends after this many generations whose last member ended with an error of its own: every process that
  /// repeats the step would meet it again.
  static constexpr int kMaxErrorsOfAll = 5;

  /// `nodes_may_join`: below the minimum it is worth waiting, even if no worker is being replaced.
  ElasticMembers(ElasticRange range, RestartPolicy policy, Time join_timeout, bool nodes_may_join)
      : range_(range), policy_(policy), join_timeout_(join_timeout), nodes_may_join_(nodes_may_join) {}

  void begin();
  /// A node brings workers, whose processes are started. Returns the number of the first one; they are consecutive.
  int add_node(int node, int workers, Time now);
  // What happened. `now` never goes back.
  MemberActions on_ready(int worker, Time now);
  MemberActions on_joined(int worker, Time now);
  MemberActions on_exit(const RankExit& exit, Time now);
  MemberActions on_leaving(int worker, Time now);
  /// A worker reports that ranks of its generation do not respond.
  MemberActions on_lost(int worker, std::uint32_t generation, const std::vector<int>& ranks, Time now);
  /// `left`: in good order.
  MemberActions on_node_gone(int node, bool left, Time now);
  MemberActions on_time(Time now);
  /// `count` must be in the range.
  MemberActions resize(int count, Time now);
  std::optional<Time> next_timer() const;

  std::uint32_t generation() const noexcept { return generation_; }
  /// The workers of the current generation, in the order of their ranks; some may be lost.
  const std::vector<int>& ranks() const noexcept { return ranks_; }
  int node_of(int worker) const { return at(worker).node; }
  /// Workers that run or are about to be replaced, except those that leave.
  int active() const;
  int active_on(int node) const;

 private:
  enum class State { starting, ready, lost, left, done };
  static constexpr int kNoNode = -1;
  struct Worker {
    int node = kNoNode;  // kNoNode: it was lost
    State state = State::starting;
    bool leaving = false;
    bool runs = true;  // its process
    int quick_failures = 0;
    Time started{0};
    std::optional<Time> replace_at = {};
    bool active() const {
      return !leaving && (state == State::starting || state == State::ready || replace_at.has_value());
    }
  };
  void check(Time now);
  void form(std::vector<int> members);
  void end();
  void finish_if_over();
  void shrink_to(int count);
  void grow_to(int count, Time now);
  void start(int worker, Time now);
  void end_late_workers();
  void drop(int worker);
  bool is_member(int worker) const { return std::find(members_.begin(), members_.end(), worker) != members_.end(); }
  /// A replacement that has not called init(). (Before the first generation, the limit of init() ends the others.)
  bool starts_late(const Worker& worker) const { return generation_ > 0 && worker.state == State::starting; }
  bool lives(int worker) const { return at(worker).state == State::ready; }
  Worker& at(int worker) { return workers_.at(static_cast<std::size_t>(worker)); }
  const Worker& at(int worker) const { return workers_.at(static_cast<std::size_t>(worker)); }
  bool knows(int worker) const { return worker >= 0 && worker < static_cast<int>(workers_.size()); }
  void print(std::string text) { actions_.emplace_back(members::Print{std::move(text)}); }
  MemberActions take() { return std::exchange(actions_, {}); }

  ElasticRange range_;
  RestartPolicy policy_;
  Time join_timeout_;
  bool nodes_may_join_;
  std::vector<Worker> workers_;
  std::uint32_t generation_ = 0;
  std::vector<int> ranks_;             // the workers of the current generation, in rank order
  std::vector<int> members_;           // without workers that are lost or have left
  bool broken_ = false;                // the current generation has lost a member
  std::set<int> joined_;               // members that have met the others
  std::set<int> met_;                  // members of the last generation that has met
  bool finishing_ = false;             // a worker is done
  bool over_ = false;                  // Finish was returned
  bool ended_ = false;                 // End was returned
  std::optional<Time> waiting_until_;  // too few workers
  int errors_of_all_ = 0;              // how often the last member ended with an error of its own
  int code_ = 1;                       // of the last failure
  MemberActions actions_;
};

}  // namespace maniple::launch
