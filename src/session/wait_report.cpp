#include "session/wait_report.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include <fmt/format.h>

#include "base/codec.h"
#include "base/log.h"
#include "session/peer_table.h"

namespace maniple {
namespace {

using Clock = Deadline::Clock;
using Kind = DetectorMessage::Kind;

constexpr std::size_t kMostCall = 4096;
constexpr std::size_t kMostMembers = 8192;  // of whom is told, as a control message has a limit
constexpr std::chrono::seconds kAnswerLimit{1};

double seconds_since(Clock::time_point when) { return std::chrono::duration<double>(Clock::now() - when).count(); }

// Worlds whose ranks are all threads of this process.
struct Table {
  std::mutex mutex;
  std::map<std::uint64_t, std::map<int, std::weak_ptr<WaitReports>>> worlds;
};
Table& table() {
  static Table it;
  return it;
}

std::shared_ptr<WaitReports> find_here(std::uint64_t world, int rank) {
  const std::lock_guard lock(table().mutex);
  const auto it = table().worlds.find(world);
  if (it == table().worlds.end()) return nullptr;
  const auto found = rank < 0 ? it->second.begin() : it->second.find(rank);
  return found == it->second.end() ? nullptr : found->second.lock();
}

// What a waiting rank knows of the call, in the text of a message.
std::string encode_wait(const CallProgress& call, const std::vector<int>& members) {
  ByteWriter writer;
  writer.put_string(std::string_view(call.call).substr(0, kMostCall));
  writer.put(static_cast<std::uint64_t>(call.seconds * 1000));
  const std::size_t count = std::min(members.size(), kMostMembers);
  writer.put(static_cast<std::uint32_t>(count));
  for (std::size_t i = 0; i < count; ++i) writer.put(static_cast<std::int32_t>(members[i]));
  return writer.take();
}

std::string describe_ranks(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", list_ranks(ranks));
}

}  // namespace

std::shared_ptr<WaitReports> WaitReports::start(Means means) {
  std::shared_ptr<WaitReports> reports(new WaitReports(std::move(means)));
  if (!reports->means_.tell_hub) {
    const std::lock_guard lock(table().mutex);
    table().worlds[reports->means_.world][reports->means_.rank] = reports;
  }
  reports->means_.loop->post([reports] { reports->check(); });
  return reports;
}

void WaitReports::stop() {
  stopped_ = true;
  questions_.clear();
  const std::lock_guard lock(table().mutex);
  const auto it = table().worlds.find(means_.world);
  if (means_.tell_hub || it == table().worlds.end()) return;
  it->second.erase(means_.rank);
  if (it->second.empty()) table().worlds.erase(it);
}

void WaitReports::check() {
  if (stopped_) return;
  auto calls = std::exchange(calls_, {});
  auto messages = std::exchange(messages_, {});
  for (const Group& group : means_.groups()) {
    Said& call = calls_[group.name] = calls[group.name];
    check_call(group, call);
    Said& message = messages_[group.name] = messages[group.name];
    check_message(group, message);
  }
  const std::chrono::duration<double> pause(std::clamp(means_.after_s / 10, 0.02, 1.0));
  means_.loop->call_at(Deadline::after(pause), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->check();
  });
}

void WaitReports::check_call(const Group& group, Said& said) {
  const CallProgress call = group.progress();
  if (!call.running || group.members.size() < 2) return;
  if (said.seq != call.seq) said = {.seq = call.seq, .next_s = means_.after_s};
  if (call.seconds < said.next_s) return;
  while (said.next_s <= call.seconds) said.next_s *= 2;
  DetectorMessage message;
  message.kind = Kind::waiting;
  message.rank = means_.rank;
  message.seq = call.seq;
  message.group = group.name;
  message.text = encode_wait(call, group.members);
  if (means_.tell_hub) return means_.tell_hub(message);
  if (const auto hub = find_here(means_.world, -1)) hub->on_waiting(message);
}

void WaitReports::check_message(const Group& group, Said& said) const {
  if (group.message.call.empty()) return;
  if (said.since != group.message.since) said = {.since = group.message.since, .next_s = means_.after_s};
  const double waited = seconds_since(said.since);
  if (waited < said.next_s) return;
  while (said.next_s <= waited) said.next_s *= 2;
  log_warning("{} has waited {:.1f} s for {}", group.message.call, waited, group.message.whom);
}

DetectorMessage WaitReports::position(const DetectorMessage& question) const {
  DetectorMessage answer = question;
  answer.kind = Kind::position;
  answer.rank = means_.rank;
  answer.seq = 0;
  answer.text = "it has destroyed this group, or has not made it yet";
  for (const Group& group : means_.groups()) {
    if (group.name != question.group) continue;
    const CallProgress call = group.progress();
    answer.seq = call.seq;
    if (call.seq == 0) {
      answer.text = "it has called nothing in this group";
    } else if (call.running) {
      answer.text = fmt::format("it is in {} for {:.1f} s", call.call, call.seconds);
    } else {
      answer.text = fmt::format("it last called {}, which ended {:.1f} s ago", call.call, call.seconds);
    }
  }
  return answer;
}

void WaitReports::on_waiting(const DetectorMessage& message) {
  if (stopped_) return;
  Question& question = questions_[message.group];
  if (question.seq != message.seq) question = Question(message.seq);
  const auto now = Clock::now();
  // The others of the group say the same in the same moment, or a little later if they came later.
  if (question.open || now < question.not_before) return;
  question.pause_s = std::max(means_.after_s, 2 * question.pause_s);
  question.not_before =
      now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(0.9 * question.pause_s));
  ByteReader reader(message.text);
  question.call = reader.get_string(kMostCall);
  question.waited_s = static_cast<double>(reader.get<std::uint64_t>()) / 1000;
  question.members.clear();
  for (auto left = reader.get<std::uint32_t>(); left > 0; --left)
    question.members.push_back(reader.get<std::int32_t>());
  question.answers.clear();
  question.open = true;
  DetectorMessage asked = message;
  asked.kind = Kind::progress;
  asked.text.clear();
  means_.loop->call_at(Deadline::after(kAnswerLimit), [weak = weak_from_this(), group = message.group] {
    if (const auto self = weak.lock()) self->conclude(group);
  });
  const std::vector<int> members = question.members;  // the last answer ends the question
  for (const int member : members) {
    if (member == means_.rank) {
      on_position(position(asked));
    } else if (means_.ask) {
      means_.ask(member, asked);
    } else if (const auto other = find_here(means_.world, member)) {
      on_position(other->position(asked));
    }
  }
}

void WaitReports::on_position(const DetectorMessage& answer) {
  const auto it = questions_.find(answer.group);
  if (stopped_ || it == questions_.end() || !it->second.open) return;
  it->second.answers[answer.rank] = answer;
  if (it->second.answers.size() == it->second.members.size()) conclude(answer.group);
}

void WaitReports::conclude(const std::string& group) {
  const auto it = questions_.find(group);
  if (stopped_ || it == questions_.end() || !std::exchange(it->second.open, false)) return;
  const Question& question = it->second;
  constexpr std::size_t kMostDescribed = 4;
  std::vector<int> came;
  std::vector<int> rest;  // of those that did not
  std::string awaited;
  std::size_t described = 0;
  for (const int member : question.members) {
    const auto answer = question.answers.find(member);
    const bool answered = answer != question.answers.end();
    if (answered && answer->second.seq >= question.seq) {
      came.push_back(member);
    } else if (described < kMostDescribed) {
      awaited += fmt::format("{}{} ({})", described++ == 0 ? "" : ", ", means_.describe(member),
                             answered ? answer->second.text : "it does not answer");
    } else {
      rest.push_back(member);
    }
  }
  if (described == 0 || came.empty()) return;  // all are there: it is the operation itself that takes long
  std::sort(came.begin(), came.end());
  std::sort(rest.begin(), rest.end());
  if (!rest.empty()) awaited += " and " + describe_ranks(rest);
  log_warning("[{}] {}: {}{} {} waited {:.1f} s for {}", group, question.call, describe_ranks(came),
              group == "world" ? "" : " of the world", came.size() == 1 ? "has" : "have", question.waited_s, awaited);
}

}  // namespace maniple
