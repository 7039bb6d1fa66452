#include "session/inquiry.h"

#include <fmt/format.h>

namespace maniple {
namespace {

constexpr std::chrono::milliseconds kLimit{400};
constexpr std::chrono::milliseconds kAgain{40};

}  // namespace

void Inquiries::begin(const DetectorMessage& abort, const std::vector<int>& others) {
  Inquiry& inquiry = open_[abort.group];
  inquiry.abort = abort;
  inquiry.question = abort;
  inquiry.question.kind = DetectorMessage::Kind::question;
  inquiry.question.text.clear();
  inquiry.awaited.insert(others.begin(), others.end());
  inquiry.awaited.insert(means_.rank);
  ask(abort.group);
  means_.loop->call_at(Deadline::after(kLimit), [weak = weak_from_this(), group = abort.group] {
    if (const auto self = weak.lock()) self->conclude(group);
  });
}

// A rank that has not come to that call yet has nothing to say; it is asked again a little later.
void Inquiries::ask(const std::string& group) {
  const auto it = open_.find(group);
  if (it == open_.end()) return;
  Inquiry& inquiry = it->second;
  if (inquiry.awaited.count(means_.rank) != 0) {
    if (auto mine = means_.called(group, inquiry.question.seq); !mine.empty()) {
      inquiry.answers[means_.rank] = mine;
      inquiry.awaited.erase(means_.rank);
    }
  }
  if (inquiry.awaited.empty()) return conclude(group);
  for (const int peer : inquiry.awaited) {
    if (peer != means_.rank) means_.send(peer, inquiry.question);
  }
  means_.loop->call_at(Deadline::after(kAgain), [weak = weak_from_this(), group] {
    if (const auto self = weak.lock()) self->ask(group);
  });
}

void Inquiries::answered(const DetectorMessage& answer) {
  const auto it = open_.find(answer.group);
  if (it == open_.end() || answer.text.empty()) return;
  it->second.answers[answer.rank] = answer.text;
  it->second.awaited.erase(answer.rank);
  if (it->second.awaited.empty()) conclude(answer.group);
}

void Inquiries::conclude(const std::string& group) {
  const auto it = open_.find(group);
  if (it == open_.end()) return;
  DetectorMessage message = it->second.abort;
  if (!it->second.answers.empty()) {
    message.text = "ranks called different things:";
    const char* separator = "";
    for (const auto& [peer, call] : it->second.answers) {
      message.text += fmt::format("{} rank {}: {}", separator, peer, call);
      separator = ";";
    }
  }
  open_.erase(it);
  means_.concluded(message);
}

}  // namespace maniple
