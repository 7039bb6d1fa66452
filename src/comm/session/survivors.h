// How the members of a failed group agree which of them survive, even if more ranks die meanwhile
// (ProcessGroup::shrink). The failure detector's leader decides.
//
//   member                             leader
//   Shrink{round 0}             ->     waits until every member that is not gone has sent a request
//                               <-     Survivors{round 1, members}
//   makes the group
//   Shrink{round 1, made}       ->     all members of round 1 live and have made it:
//                               <-     Survivors{round 1, members, confirmed}: shrink() returns
//                                      otherwise: Survivors{round 2, fewer members}, and so on
//
// The confirmation makes the result uniform: no member uses a group that another one could not make.
//
// Members repeat their request, and what they know of the leader's decisions, to each new leader. A decision that an
// earlier leader has sent to some members therefore stands as long as one of them lives. A decision that only dead
// ranks knew does not matter.
//
// A part of the detector's core: events go in, effects come out.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "comm/session/detector_effect.h"

namespace maniple::detector {

class SurvivorAgreement {
 public:
  explicit SurvivorAgreement(int rank) : rank_(rank) {}

  // ---- As a member
  /// This rank's request. The caller sends it to the leader, or calls take() if this rank leads.
  void request(const Shrink& request) { own_[request.group] = request; }
  /// This rank does not wait any more.
  void cancel(const std::string& group) { own_.erase(group); }
  /// The leader's decision. Returns true if it answers this rank's request.
  bool decided(const Survivors& decision);
  /// What a new leader needs to know from this rank.
  std::vector<Message> report() const;
  const std::map<std::string, Shrink>& own() const noexcept { return own_; }

  // ---- As the leader, or before this rank knows that it leads
  void take(const Shrink& request);
  /// The rank does not wait any more. Returns the members that have sent no request.
  Missing take(const CancelShrink& message, const std::map<int, Message>& gone);
  /// What another member knows of an earlier leader's decision.
  void adopt(const Survivors& decision);
  /// The decisions that are due, for each member that waits. `gone`: ranks that are gone.
  void decide(const std::map<int, Message>& gone, Effects& effects);
  void forget(int rank);  ///< the rank is gone

 private:
  static bool answers(const Survivors& decision, const Shrink& request);
  void send(int to, const Survivors& decision, Effects& effects) const;

  int rank_;
  std::map<std::string, Shrink> own_;                      // by group: what this rank waits for
  std::map<std::string, Survivors> decisions_;             // by group: the latest one that this rank knows
  std::map<std::string, std::map<int, Shrink>> requests_;  // by group and rank
  std::map<std::string, std::set<int>> gave_up_;           // by group: ranks that have canceled their request
};

}  // namespace maniple::detector
