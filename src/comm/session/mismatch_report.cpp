#include "comm/session/mismatch_report.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/call/signature.h"

namespace maniple {
namespace {

constexpr std::chrono::milliseconds kLimit{400};
constexpr std::chrono::milliseconds kRetry{40};

}  // namespace

void MismatchReports::begin(const DetectorMessage& abort, const std::vector<int>& others) {
  open(abort, others, false);
}

void MismatchReports::compare(const DetectorMessage& question, const std::vector<int>& others) {
  if (open_.count(question.group) != 0) return;  // other waiting ranks send the same question
  DetectorMessage abort = question;
  abort.kind = DetectorMessage::Kind::abort;
  open(abort, others, true);
}

void MismatchReports::open(const DetectorMessage& abort, const std::vector<int>& others, bool compares) {
  const std::string group = abort.group;
  Query& query = open_[group] = Query{};
  query.number = ++queries_;
  query.compares = compares;
  query.abort = abort;
  query.request = abort;
  query.request.kind = DetectorMessage::Kind::query_call;
  query.request.text.clear();
  query.awaited.insert(others.begin(), others.end());
  query.awaited.insert(callbacks_.rank);
  const std::uint64_t number = query.number;
  ask(group, number);
  callbacks_.loop->call_at(Deadline::after(kLimit), [weak = weak_from_this(), group, number] {
    const auto self = weak.lock();
    if (self && self->open_.count(group) != 0 && self->open_[group].number == number) self->finish(group);
  });
}

// A rank that has not made the call yet is queried again a little later.
void MismatchReports::ask(const std::string& group, std::uint64_t number) {
  const auto it = open_.find(group);
  if (it == open_.end() || it->second.number != number) return;
  Query& query = it->second;
  if (query.awaited.count(callbacks_.rank) != 0) {
    RankCall mine = callbacks_.called(group, query.request.seq);
    if (mine.call.empty()) {
      if (mine.rank >= 0) query.pending.insert(callbacks_.rank);
    } else {
      query.answers[callbacks_.rank] = std::move(mine);
      query.awaited.erase(callbacks_.rank);
    }
  }
  if (query.awaited.empty()) return finish(group);
  for (const int peer : query.awaited) {
    if (peer != callbacks_.rank) callbacks_.send(peer, query.request);
  }
  callbacks_.loop->call_at(Deadline::after(kRetry), [weak = weak_from_this(), group, number] {
    if (const auto self = weak.lock()) self->ask(group, number);
  });
}

void MismatchReports::answered(const DetectorMessage& answer) {
  const auto it = open_.find(answer.group);
  if (it == open_.end() || answer.seq != it->second.request.seq) return;
  if (answer.kind == DetectorMessage::Kind::call_pending) {
    it->second.pending.insert(answer.rank);
    return;
  }
  it->second.answers[answer.rank] = {.rank = answer.rank, .call = answer.text, .place = answer.place};
  it->second.awaited.erase(answer.rank);
  if (it->second.awaited.empty()) finish(answer.group);
}

void MismatchReports::finish(const std::string& group) {
  const auto it = open_.find(group);
  if (it == open_.end()) return;
  DetectorMessage message = it->second.abort;
  std::vector<RankCall> calls;
  for (auto& [peer, call] : it->second.answers) calls.push_back(std::move(call));
  const auto is_other = [&](const RankCall& call) { return call.call != calls.front().call; };
  if (it->second.compares) {
    open_.erase(it);
    const auto operation = [](const RankCall& call) { return call.call.substr(0, call.call.find(' ')); };
    const auto differs = [&](const RankCall& call) { return operation(call) != operation(calls.front()); };
    if (std::none_of(calls.begin(), calls.end(), differs)) return;
    message.error = mismatch_of(std::move(calls));
    return callbacks_.finished(message);
  }
  // If the calls agree, a time-out stays a time-out and names the ranks that did not call.
  if (message.error.kind == ErrorKind::timeout) {
    std::vector<int> late;
    for (const int rank : it->second.pending) {
      if (it->second.awaited.count(rank) != 0) late.push_back(rank);
    }
    if (std::any_of(calls.begin(), calls.end(), is_other)) {
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
  open_.erase(it);
  callbacks_.finished(message);
}

}  // namespace maniple
