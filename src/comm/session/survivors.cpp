#include "comm/session/survivors.h"

#include <algorithm>
#include <utility>

namespace maniple::detector {

bool SurvivorAgreement::answers(const Survivors& decision, const Shrink& request) {
  if (decision.seq != request.seq) return decision.seq > request.seq;
  return decision.confirmed && request.made;
}

bool SurvivorAgreement::decided(const Survivors& decision) {
  adopt(decision);
  const auto it = own_.find(decision.group);
  if (it == own_.end() || !answers(decision, it->second)) return false;
  own_.erase(it);
  return true;
}

std::vector<Message> SurvivorAgreement::report() const {
  std::vector<Message> messages;
  for (const auto& [group, decision] : decisions_) messages.emplace_back(decision);
  for (const auto& [group, request] : own_) messages.emplace_back(request);
  return messages;
}

void SurvivorAgreement::take(const Shrink& request) {
  requests_[request.group][request.rank] = request;
  gave_up_[request.group].erase(request.rank);
}

void SurvivorAgreement::adopt(const Survivors& decision) {
  const auto [it, is_new] = decisions_.try_emplace(decision.group, decision);
  if (is_new) return;
  const bool is_newer = decision.seq > it->second.seq || (decision.seq == it->second.seq && decision.confirmed);
  if (is_newer) it->second = decision;
}

Missing SurvivorAgreement::take(const CancelShrink& message, const std::map<int, Message>& gone) {
  Missing missing{.group = message.group};
  const auto it = requests_.find(message.group);
  if (it == requests_.end() || it->second.empty()) return missing;
  std::set<int>& gave_up = gave_up_[message.group];
  for (const std::int32_t member : it->second.begin()->second.members) {
    const bool has_called = it->second.count(member) != 0 || gave_up.count(member) != 0;
    if (!has_called && gone.count(member) == 0) missing.members.push_back(member);
  }
  it->second.erase(message.rank);
  gave_up.insert(message.rank);
  return missing;
}

void SurvivorAgreement::forget(int rank) {
  for (auto& [group, requests] : requests_) requests.erase(rank);
}

void SurvivorAgreement::send(int to, const Survivors& decision, Effects& effects) const {
  if (to == rank_) {
    effects.emplace_back(ReportSurvivors{decision});
  } else {
    effects.emplace_back(Send{.to = to, .message = decision});
  }
}

void SurvivorAgreement::decide(const std::map<int, Message>& gone, Effects& effects) {
  for (auto& entry : requests_) {
    const std::string& group = entry.first;
    std::map<int, Shrink>& requests = entry.second;
    // Decisions that a member has missed.
    const auto known = decisions_.find(group);
    for (auto it = requests.begin(); known != decisions_.end() && it != requests.end();) {
      const bool is_answered = answers(known->second, it->second);
      if (is_answered) send(it->first, known->second, effects);
      it = is_answered ? requests.erase(it) : std::next(it);
    }
    if (requests.empty()) continue;
    Survivors next{.group = group};
    const auto& members = requests.begin()->second.members;
    std::copy_if(members.begin(), members.end(), std::back_inserter(next.members),
                 [&](std::int32_t member) { return gone.count(member) == 0; });
    const auto waits = [&](std::int32_t member) { return requests.count(member) != 0; };
    if (!std::all_of(next.members.begin(), next.members.end(), waits)) continue;
    bool made = known != decisions_.end() && known->second.members == next.members;
    std::uint64_t last = known != decisions_.end() ? known->second.seq : 0;
    for (const auto& [rank, request] : requests) {
      made = made && request.made && request.seq == last;
      last = std::max(last, request.seq);
    }
    next.seq = made ? last : last + 1;
    next.confirmed = made;
    decisions_[group] = next;
    for (const auto& [rank, request] : std::exchange(requests, {})) send(rank, next, effects);
  }
  std::erase_if(requests_, [](const auto& entry) { return entry.second.empty(); });
}

}  // namespace maniple::detector
