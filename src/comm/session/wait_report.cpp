#include "comm/session/wait_report.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "comm/base/fork_guard.h"
#include "comm/base/log.h"
#include "comm/base/mutex.h"
#include "comm/session/peer_table.h"

namespace maniple {
namespace {

using Clock = Deadline::Clock;

constexpr std::chrono::seconds kAnswerLimit{1};

double seconds_since(Clock::time_point when) { return std::chrono::duration<double>(Clock::now() - when).count(); }

// Worlds whose ranks are all threads of this process.
struct Table {
  Mutex mutex;
  std::map<std::uint64_t, std::map<int, std::weak_ptr<WaitReports>>> worlds MANIPLE_GUARDED_BY(mutex);
};
constinit ProcessWide<Table> process_reports;

std::shared_ptr<WaitReports> find_here(std::uint64_t world, int rank) {
  Table& table = *process_reports;
  const MutexLock lock(table.mutex);
  const auto it = table.worlds.find(world);
  if (it == table.worlds.end()) return nullptr;
  const auto found = rank < 0 ? it->second.begin() : it->second.find(rank);
  return found == it->second.end() ? nullptr : found->second.lock();
}

std::string describe_ranks(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", list_ranks(ranks));
}

}  // namespace

std::shared_ptr<WaitReports> WaitReports::start(Callbacks callbacks) {
  std::shared_ptr<WaitReports> reports(new WaitReports(std::move(callbacks)));
  if (!reports->callbacks_.send_to_leader) {
    Table& table = *process_reports;
    const MutexLock lock(table.mutex);
    table.worlds[reports->callbacks_.world][reports->callbacks_.rank] = reports;
  }
  reports->callbacks_.loop->post([reports] { reports->check(); });
  return reports;
}

void WaitReports::stop() {
  stopped_ = true;
  queries_.clear();
  Table& table = *process_reports;
  const MutexLock lock(table.mutex);
  const auto it = table.worlds.find(callbacks_.world);
  if (callbacks_.send_to_leader || it == table.worlds.end()) return;
  it->second.erase(callbacks_.rank);
  if (it->second.empty()) table.worlds.erase(it);
}

void WaitReports::check() {
  if (stopped_) return;
  const std::chrono::duration<double> pause(std::clamp(callbacks_.after_s / 10, 0.02, 1.0));
  callbacks_.loop->call_at(Deadline::after(pause), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->check();
  });
  auto calls = std::exchange(calls_, {});
  auto messages = std::exchange(messages_, {});
  for (const Group& group : callbacks_.groups()) {
    Logged& call = calls_[group.name] = calls[group.name];
    check_call(group, call);
    Logged& message = messages_[group.name] = messages[group.name];
    check_message(group, message);
  }
}

void WaitReports::check_call(const Group& group, Logged& logged) {
  const CallProgress call = group.progress();
  if (!call.running || group.members.size() < 2) return;
  if (logged.seq != call.seq) logged = {.seq = call.seq, .next_s = callbacks_.after_s};
  if (call.seconds < logged.next_s) return;
  while (logged.next_s <= call.seconds) logged.next_s *= 2;
  const detector::Waiting message{.rank = callbacks_.rank,
                                  .seq = call.seq,
                                  .group = group.name,
                                  .call = call.call,
                                  .waited_ms = static_cast<std::uint64_t>(call.seconds * 1000),
                                  .members = {group.members.begin(), group.members.end()}};
  if (callbacks_.send_to_leader) return callbacks_.send_to_leader(message);
  if (const auto leader = find_here(callbacks_.world, -1)) leader->on_waiting(message);
}

void WaitReports::check_message(const Group& group, Logged& logged) const {
  if (group.message.call.empty()) return;
  if (logged.since != group.message.since) logged = {.since = group.message.since, .next_s = callbacks_.after_s};
  const double waited = seconds_since(logged.since);
  if (waited < logged.next_s) return;
  while (logged.next_s <= waited) logged.next_s *= 2;
  log_warning("{} has waited {:.1f} s for {}", group.message.call, waited, group.message.whom);
}

detector::ProgressReply WaitReports::progress(const detector::QueryProgress& query) const {
  detector::ProgressReply answer{.rank = callbacks_.rank, .group = query.group};
  answer.text = "it has destroyed this group, or has not made it yet";
  for (const Group& group : callbacks_.groups()) {
    if (group.name != query.group) continue;
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

void WaitReports::on_waiting(const detector::Waiting& message) {
  if (stopped_) return;
  Query& query = queries_[message.group];
  if (query.seq != message.seq) query = Query(message.seq);
  const auto now = Clock::now();
  // Other ranks of the group report the same call at about the same time, or later if they arrived later.
  if (query.open || now < query.not_before) return;
  query.pause_s = std::max(callbacks_.after_s, 2 * query.pause_s);
  query.not_before =
      now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(0.9 * query.pause_s));
  query.call = message.call;
  query.waited_s = static_cast<double>(message.waited_ms) / 1000;
  query.members = message.members;
  query.answers.clear();
  query.open = true;
  const detector::QueryProgress asked{.group = message.group};
  callbacks_.loop->call_at(Deadline::after(kAnswerLimit), [weak = weak_from_this(), group = message.group] {
    if (const auto self = weak.lock()) self->finish(group);
  });
  const std::vector<int> members = query.members;  // copied, as the last reply ends the query
  for (const int member : members) {
    if (member == callbacks_.rank) {
      on_progress_reply(progress(asked));
    } else if (callbacks_.ask) {
      callbacks_.ask(member, asked);
    } else if (const auto other = find_here(callbacks_.world, member)) {
      on_progress_reply(other->progress(asked));
    }
  }
}

void WaitReports::on_progress_reply(const detector::ProgressReply& answer) {
  const auto it = queries_.find(answer.group);
  if (stopped_ || it == queries_.end() || !it->second.open) return;
  it->second.answers[answer.rank] = answer;
  if (it->second.answers.size() == it->second.members.size()) finish(answer.group);
}

void WaitReports::finish(const std::string& group) {
  const auto it = queries_.find(group);
  if (stopped_ || it == queries_.end() || !std::exchange(it->second.open, false)) return;
  const Query& query = it->second;
  constexpr std::size_t kMostDescribed = 4;
  std::vector<int> arrived;
  std::vector<int> rest;  // ranks that have not arrived and are not described
  std::string awaited;
  std::size_t described = 0;
  for (const int member : query.members) {
    const auto answer = query.answers.find(member);
    const bool answered = answer != query.answers.end();
    if (answered && answer->second.seq >= query.seq) {
      arrived.push_back(member);
    } else if (described < kMostDescribed) {
      awaited += fmt::format("{}{} ({})", described++ == 0 ? "" : ", ", callbacks_.describe(member),
                             answered ? answer->second.text : "it does not answer");
    } else {
      rest.push_back(member);
    }
  }
  if (described == 0 || arrived.empty()) return;  // all have arrived: the operation itself takes long
  std::sort(arrived.begin(), arrived.end());
  std::sort(rest.begin(), rest.end());
  if (!rest.empty()) awaited += " and " + describe_ranks(rest);
  log_warning("[{}] {}: {}{} {} waited {:.1f} s for {}", group, query.call, describe_ranks(arrived),
              group == "world" ? "" : " of the world", arrived.size() == 1 ? "has" : "have", query.waited_s, awaited);
}

}  // namespace maniple
