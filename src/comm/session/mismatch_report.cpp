#include "comm/session/mismatch_report.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/codec.h"
#include "comm/call/signature.h"

namespace maniple {
namespace {

using Clock = Deadline::Clock;

constexpr std::chrono::milliseconds kLimit{400};
constexpr std::chrono::milliseconds kRetry{40};
// All waiting ranks request the same comparison. While they wait it is repeated, ever more rarely: a late rank may make
// a different call, and go on.
constexpr std::chrono::milliseconds kLeastComparePause{200};
constexpr std::chrono::milliseconds kMostComparePause{2000};
constexpr std::size_t kMostCompared = 8192;  // a control message is limited

}  // namespace

std::string encode(const ComparedCalls& compared) {
  ByteWriter writer;
  writer.put(static_cast<std::uint8_t>(compared.arguments ? 1 : 0));
  const std::size_t count = compared.members.size() > kMostCompared ? 0 : compared.members.size();
  writer.put(static_cast<std::uint32_t>(count));
  for (std::size_t i = 0; i < count; ++i) writer.put(static_cast<std::int32_t>(compared.members[i]));
  return writer.take();
}

ComparedCalls decode_compared_calls(std::string_view bytes) {
  ByteReader reader(bytes);
  ComparedCalls compared;
  compared.arguments = reader.get<std::uint8_t>() != 0;
  const auto count = reader.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < count; ++i) compared.members.push_back(reader.get<std::int32_t>());
  reader.expect_end();
  return compared;
}

bool calls_differ(const std::vector<RankCall>& calls, bool arguments) {
  const auto compared = [&](const RankCall& call) {
    return std::string_view(call.call).substr(0, arguments ? std::string_view::npos : call.call.find(' '));
  };
  return std::any_of(calls.begin(), calls.end(),
                     [&](const RankCall& call) { return compared(call) != compared(calls.front()); });
}

void MismatchReports::begin(const DetectorMessage& abort, const std::vector<int>& others) {
  Query query;
  query.awaited.insert(others.begin(), others.end());
  query.awaited.insert(callbacks_.rank);
  open(abort, std::move(query));
}

void MismatchReports::compare(const DetectorMessage& question, const std::vector<int>& others) {
  const ComparedCalls compared = decode_compared_calls(question.text);
  if (is_open(question.group) || !is_due(question, others)) return;
  Query query;
  query.compares = true;
  query.arguments = compared.arguments;
  query.awaited.insert(compared.members.begin(), compared.members.end());
  const auto is_absent = [&](int rank) {
    return rank != callbacks_.rank && std::find(others.begin(), others.end(), rank) == others.end();
  };
  if (compared.members.empty()) {
    query.awaited.insert(others.begin(), others.end());
    query.awaited.insert(callbacks_.rank);
  } else {
    std::erase_if(query.awaited, is_absent);
  }
  DetectorMessage abort = question;
  abort.kind = DetectorMessage::Kind::abort;
  abort.text.clear();
  open(abort, std::move(query));
}

// Whether a comparison may begin now. If not, it begins later.
bool MismatchReports::is_due(const DetectorMessage& question, const std::vector<int>& others) {
  const auto now = Clock::now();
  std::erase_if(paces_, [&](const auto& entry) {
    return !entry.second.scheduled && entry.second.next + 4 * kMostComparePause < now;
  });
  const std::pair key(question.group, question.seq);
  Pace& pace = paces_[key];
  if (pace.scheduled) return false;
  if (open_.count(question.group) != 0) pace.next = std::max<Clock::time_point>(pace.next, now + kRetry);
  if (now >= pace.next) {
    pace.pause = std::clamp<Clock::duration>(2 * pace.pause, kLeastComparePause, kMostComparePause);
    pace.next = now + pace.pause;
    return true;
  }
  pace.scheduled = true;
  callbacks_.loop->call_at(Deadline(pace.next), [weak = weak_from_this(), key, question, others] {
    const auto self = weak.lock();
    if (!self || self->paces_.count(key) == 0) return;
    self->paces_[key].scheduled = false;
    self->compare(question, others);
  });
  return false;
}

void MismatchReports::stop() {
  open_.clear();
  paces_.clear();
}

void MismatchReports::open(const DetectorMessage& abort, Query query) {
  const std::string group = abort.group;
  query.number = ++queries_;
  query.abort = abort;
  query.request = abort;
  query.request.kind = DetectorMessage::Kind::query_call;
  query.request.text.clear();
  const std::uint64_t number = query.number;
  open_[group] = std::move(query);
  ask(group, number);
  callbacks_.loop->call_at(Deadline::after(kLimit), [weak = weak_from_this(), group, number] {
    const auto self = weak.lock();
    if (self && self->open_.count(group) != 0 && self->open_[group].number == number) self->finish(group);
  });
}

// A comparison does not wait for a rank that has not made the call.
bool MismatchReports::is_complete(const Query& query) const {
  const auto is_late = [&](int rank) { return query.compares && query.pending.count(rank) != 0; };
  return std::all_of(query.awaited.begin(), query.awaited.end(), is_late);
}

// For a reported error, a rank that has not made the call yet is queried again a little later.
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
  if (is_complete(query)) return finish(group);
  for (const int peer : query.awaited) {
    if (peer != callbacks_.rank) callbacks_.send(peer, query.request);
  }
  if (query.compares) return;
  callbacks_.loop->call_at(Deadline::after(kRetry), [weak = weak_from_this(), group, number] {
    if (const auto self = weak.lock()) self->ask(group, number);
  });
}

void MismatchReports::answered(const DetectorMessage& answer) {
  const auto it = open_.find(answer.group);
  if (it == open_.end() || answer.seq != it->second.request.seq) return;
  Query& query = it->second;
  if (answer.kind == DetectorMessage::Kind::call_pending) {
    query.pending.insert(answer.rank);
  } else {
    query.answers[answer.rank] = {.rank = answer.rank, .call = answer.text, .place = answer.place};
    query.awaited.erase(answer.rank);
  }
  if (is_complete(query)) finish(answer.group);
}

void MismatchReports::finish(const std::string& group) {
  const auto it = open_.find(group);
  if (it == open_.end()) return;
  DetectorMessage message = it->second.abort;
  std::vector<RankCall> calls;
  for (auto& [peer, call] : it->second.answers) calls.push_back(std::move(call));
  if (it->second.compares) {
    const bool differ = calls_differ(calls, it->second.arguments);
    open_.erase(it);
    if (!differ) return;
    message.error = mismatch_of(std::move(calls));
    message.error.origin = message.rank;
    return callbacks_.finished(message);
  }
  // If the calls agree, a time-out stays a time-out and names the ranks that did not call.
  if (message.error.kind == ErrorKind::timeout) {
    std::vector<int> late;
    for (const int rank : it->second.pending) {
      if (it->second.awaited.count(rank) != 0) late.push_back(rank);
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
  open_.erase(it);
  callbacks_.finished(message);
}

}  // namespace maniple
