#include "comm/session/mismatch_report.h"

#include <algorithm>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/call/signature.h"

namespace maniple {

bool calls_differ(const std::vector<RankCall>& calls, bool arguments) {
  const auto compared = [&](const RankCall& call) {
    return std::string_view(call.call).substr(0, arguments ? std::string_view::npos : call.call.find(' '));
  };
  return std::any_of(calls.begin(), calls.end(),
                     [&](const RankCall& call) { return compared(call) != compared(calls.front()); });
}

namespace detector {
namespace {

constexpr std::chrono::milliseconds kLimit{400};
constexpr std::chrono::milliseconds kRetry{40};
// All waiting ranks request the same comparison. While they wait it is repeated, ever more rarely: a late rank may make
// a different call, and go on.
constexpr std::chrono::milliseconds kLeastComparePause{200};
constexpr std::chrono::milliseconds kMostComparePause{2000};

}  // namespace

void MismatchReports::begin(const Abort& abort, const std::vector<int>& others, Time now, Effects& effects) {
  Query query{.abort = abort, .awaited = {others.begin(), others.end()}};
  query.awaited.insert(rank_);
  open(std::move(query), now, effects);
}

void MismatchReports::compare(const Compare& question, const std::vector<int>& others, Time now, Effects& effects) {
  if (is_open(question.group) || !is_due(question, now)) return;
  Query query{.compares = true,
              .arguments = question.arguments,
              .abort = {.rank = question.rank, .seq = question.seq, .group = question.group},
              .awaited = {question.members.begin(), question.members.end()}};
  if (question.members.empty()) {
    query.awaited.insert(others.begin(), others.end());
    query.awaited.insert(rank_);
  }
  std::erase_if(query.awaited, [&](int rank) {
    return rank != rank_ && std::find(others.begin(), others.end(), rank) == others.end();
  });
  open(std::move(query), now, effects);
}

// Whether a comparison may begin now. If not, it begins later.
bool MismatchReports::is_due(const Compare& question, Time now) {
  std::erase_if(paces_, [&](const auto& entry) {
    return !entry.second.scheduled && entry.second.next + 4 * kMostComparePause < now;
  });
  Pace& pace = paces_[{question.group, question.seq}];
  if (pace.scheduled) return false;
  if (open_.count(question.group) != 0) pace.next = std::max<Time>(pace.next, now + kRetry);
  if (now >= pace.next) {
    pace.pause = std::clamp<Clock::duration>(2 * pace.pause, kLeastComparePause, kMostComparePause);
    pace.next = now + pace.pause;
    return true;
  }
  pace.scheduled = question;
  return false;
}

void MismatchReports::stop() {
  open_.clear();
  paces_.clear();
}

void MismatchReports::open(Query query, Time now, Effects& effects) {
  query.until = now + kLimit;
  Query& opened = open_[query.abort.group] = std::move(query);
  ask(opened, now, effects);
}

// A comparison does not wait for a rank that has not made the call.
bool MismatchReports::is_complete(const Query& query) {
  const auto is_late = [&](int rank) { return query.compares && query.pending.count(rank) != 0; };
  return std::all_of(query.awaited.begin(), query.awaited.end(), is_late);
}

// For a reported error, a rank that has not made the call yet is queried again a little later.
void MismatchReports::ask(Query& query, Time now, Effects& effects) const {
  const QueryCall request{.seq = query.abort.seq, .group = query.abort.group};
  for (const int peer : query.awaited) {
    if (peer == rank_) {
      effects.push_back(LookUpCall{.asker = rank_, .query = request});
    } else {
      effects.push_back(Send{.to = peer, .message = request});
    }
  }
  query.ask_at = query.compares ? std::nullopt : std::optional<Time>(now + kRetry);
}

void MismatchReports::answered(const QueryCall& query, RankCall call) {
  const auto it = open_.find(query.group);
  if (it == open_.end() || query.seq != it->second.abort.seq) return;
  const int rank = call.rank;
  if (call.call.empty()) {
    it->second.pending.insert(rank);
  } else {
    it->second.answers[rank] = std::move(call);
    it->second.awaited.erase(rank);
  }
  if (is_complete(it->second)) finish(it);
}

void MismatchReports::forget(int rank) {
  for (auto it = open_.begin(); it != open_.end();) {
    const bool was_last = it->second.awaited.erase(rank) != 0 && is_complete(it->second);
    it = was_last ? finish(it) : std::next(it);
  }
}

void MismatchReports::wake(const std::vector<int>& others, Time now, Effects& effects) {
  for (auto it = open_.begin(); it != open_.end();) {
    if (now >= it->second.until) {
      it = finish(it);
      continue;
    }
    if (it->second.ask_at && now >= *it->second.ask_at) ask(it->second, now, effects);
    ++it;
  }
  std::vector<Compare> due;
  for (auto& [call, pace] : paces_) {
    if (pace.scheduled && now >= pace.next) due.push_back(*std::exchange(pace.scheduled, std::nullopt));
  }
  for (const Compare& question : due) compare(question, others, now, effects);
}

std::optional<Time> MismatchReports::due() const {
  std::optional<Time> due;
  const auto at = [&due](Time when) { due = std::min(due.value_or(when), when); };
  for (const auto& [group, query] : open_) at(std::min(query.ask_at.value_or(query.until), query.until));
  for (const auto& [call, pace] : paces_) {
    if (pace.scheduled) at(pace.next);
  }
  return due;
}

MismatchReports::Open::iterator MismatchReports::finish(Open::iterator it) {
  const Query query = std::move(it->second);
  it = open_.erase(it);
  Abort message = query.abort;
  std::vector<RankCall> calls;
  for (const auto& [peer, call] : query.answers) calls.push_back(call);
  if (query.compares) {
    if (!calls_differ(calls, query.arguments)) return it;
    message.error = mismatch_of(std::move(calls));
    message.error.origin = message.rank;
    finished_.push_back(std::move(message));
    return it;
  }
  // If the calls agree, a time-out stays a time-out and names the ranks that did not call.
  if (message.error.kind == ErrorKind::timeout) {
    std::vector<int> late;
    for (const int rank : query.pending) {
      if (query.awaited.count(rank) != 0) late.push_back(rank);
    }
    if (calls_differ(calls, true)) {
      message.error = mismatch_of(std::move(calls));
    } else if (!late.empty()) {
      const int size = message.error.size;
      message.error.reason =
          fmt::format("timed out after {:.1f} s: {} of {} ranks arrived, waiting for rank{} {}", message.error.waited_s,
                      size - static_cast<int>(late.size()), size, late.size() == 1 ? "" : "s", fmt::join(late, ", "));
      message.error.ranks = std::move(late);
    }
  } else if (!calls.empty()) {
    ErrorInfo listed = mismatch_of(std::move(calls));
    message.error.calls = std::move(listed.calls);
    message.error.reason = std::move(listed.reason);
  }
  finished_.push_back(std::move(message));
  return it;
}

}  // namespace detector
}  // namespace maniple
