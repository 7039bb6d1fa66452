#include "session/mismatch_report.h"

#include <fmt/format.h>

namespace maniple {
namespace {

constexpr std::chrono::milliseconds kLimit{400};
constexpr std::chrono::milliseconds kRetry{40};

}  // namespace

void MismatchReports::begin(const DetectorMessage& abort, const std::vector<int>& others) {
  Query& query = open_[abort.group];
  query.abort = abort;
  query.request = abort;
  query.request.kind = DetectorMessage::Kind::query_call;
  query.request.text.clear();
  query.awaited.insert(others.begin(), others.end());
  query.awaited.insert(callbacks_.rank);
  ask(abort.group);
  callbacks_.loop->call_at(Deadline::after(kLimit), [weak = weak_from_this(), group = abort.group] {
    if (const auto self = weak.lock()) self->finish(group);
  });
}

// A rank that has not made that call yet has no answer; it is asked again a little later.
void MismatchReports::ask(const std::string& group) {
  const auto it = open_.find(group);
  if (it == open_.end()) return;
  Query& query = it->second;
  if (query.awaited.count(callbacks_.rank) != 0) {
    if (auto mine = callbacks_.called(group, query.request.seq); !mine.empty()) {
      query.answers[callbacks_.rank] = mine;
      query.awaited.erase(callbacks_.rank);
    }
  }
  if (query.awaited.empty()) return finish(group);
  for (const int peer : query.awaited) {
    if (peer != callbacks_.rank) callbacks_.send(peer, query.request);
  }
  callbacks_.loop->call_at(Deadline::after(kRetry), [weak = weak_from_this(), group] {
    if (const auto self = weak.lock()) self->ask(group);
  });
}

void MismatchReports::answered(const DetectorMessage& answer) {
  const auto it = open_.find(answer.group);
  if (it == open_.end() || answer.text.empty()) return;
  it->second.answers[answer.rank] = answer.text;
  it->second.awaited.erase(answer.rank);
  if (it->second.awaited.empty()) finish(answer.group);
}

void MismatchReports::finish(const std::string& group) {
  const auto it = open_.find(group);
  if (it == open_.end()) return;
  DetectorMessage message = it->second.abort;
  if (!it->second.answers.empty()) {
    message.error.reason = "ranks called different things:";
    const char* separator = "";
    for (const auto& [peer, call] : it->second.answers) {
      message.error.reason += fmt::format("{} rank {}: {}", separator, peer, call);
      separator = ";";
    }
  }
  open_.erase(it);
  callbacks_.finished(message);
}

}  // namespace maniple
