#include "launch/coordinate/coordinator.h"

#include <algorithm>
#include <csignal>
#include <set>
#include <utility>

#include <fmt/format.h>

namespace maniple::launch {
namespace {

using Kind = AgentMessage::Kind;
using Seconds = std::chrono::duration<double>;

// Ranks that wait for a dead one fail milliseconds after it: time for the cause itself to be seen.
constexpr Seconds kVerdictPatience{0.15};
constexpr Seconds kVerdictSoon{0.01};
constexpr Seconds kVerdictNodes{0.05};
constexpr Seconds kReminder{5.0};
constexpr int kUnusable = 2;  // the exit code for a port that cannot be had

}  // namespace

Coordinator::Coordinator(CoordinatorOptions options, Effects effects) : options_(options), effects_(std::move(effects)) {}

void Coordinator::begin() {
  if (options_.nodes.max == 1 && !options_.summons) return;
  effects_.set_timer(Timer::join_timeout, options_.join_timeout);
  effects_.set_timer(Timer::reminder, kReminder);
}

// --- who belongs to the job ---

std::string Coordinator::refusal(const AgentMessage& join) const {
  if (state_ == State::done) return "the job has ended";
  if (join.max_nodes != 0 && (join.min_nodes != options_.nodes.min || join.max_nodes != options_.nodes.max)) {
    return fmt::format("--nnodes is {}:{} there but {}:{} at the master; give all nodes the same", join.min_nodes,
                       join.max_nodes, options_.nodes.min, options_.nodes.max);
  }
  if (nodes_.size() >= static_cast<std::size_t>(options_.nodes.max)) {
    return fmt::format("the job has all of its {} nodes already", options_.nodes.max);
  }
  if (join.node_rank >= options_.nodes.max) {
    return fmt::format("--node-rank is {} but the job has {} nodes; expected 0 to {}", join.node_rank,
                       options_.nodes.max, options_.nodes.max - 1);
  }
  for (const auto& [node, info] : nodes_) {
    if (join.node_rank >= 0 && info.wanted_rank == join.node_rank) {
      return fmt::format("node rank {} is taken by host {}; give each node its own --node-rank", join.node_rank,
                         info.host);
    }
  }
  return {};
}

void Coordinator::joined(Node node, const AgentMessage& join) {
  if (const std::string reason = refusal(join); !reason.empty()) {
    AgentMessage answer{.kind = Kind::quit};
    answer.code = 1;
    answer.text = fmt::format("maniple: the master refuses this node (host {}): {}", join.host, reason);
    effects_.send(node, answer);
    return;
  }
  nodes_[node] = NodeInfo{.host = join.host,
                          .core_place = join.text,
                          .wanted_rank = join.node_rank,
                          .processes = join.processes,
                          .devices_per_process = join.devices_per_process};
  if (state_ == State::gathering) {
    consider_start();
  } else if (state_ == State::running && failure_code_ == std::nullopt && interrupted_ == 0 && exits_.empty()) {
    effects_.say(fmt::format("maniple: host {} joins: the group is formed anew with {} nodes", join.host, nodes_.size()));
    stop_all(SIGTERM, options_.grace);
  }
}

void Coordinator::lost(Node node, const std::string& reason) {
  const auto found = nodes_.find(node);
  if (found == nodes_.end()) return;
  const NodeInfo info = found->second;
  nodes_.erase(found);
  if (state_ == State::done) return;
  if (info.node_rank < 0) return effects_.say(fmt::format("maniple: host {} has left before the start: {}", info.host, reason));
  const std::string text =
      fmt::format("maniple: node {} (host {}) is lost: {}", info.node_rank, info.host, reason);
  if (state_ == State::reserving || state_ == State::running) {
    effects_.stop_timer(Timer::verdict);
    const bool enough = options_.nodes.elastic() && nodes_.size() >= static_cast<std::size_t>(options_.nodes.min);
    effects_.say(enough ? text + fmt::format("; the group is formed anew with {}", nodes_.size()) : text);
    if (!enough) {
      failure_code_ = 1;
      ++failures_;
      tell_all(text);
    }
    stop_all(SIGTERM, options_.grace);
  } else if (state_ == State::stopping) {
    consider_stopped();
  }
}

std::string Coordinator::missing() const {
  std::set<int> taken;
  for (const auto& [node, info] : nodes_) {
    if (info.wanted_rank >= 0) taken.insert(info.wanted_rank);
  }
  std::string ranks;
  int count = 0;
  const bool all_said = taken.size() == nodes_.size() && !nodes_.empty();
  for (int rank = 0; all_said && rank < options_.nodes.min && count < 16; ++rank) {
    if (taken.count(rank) != 0) continue;
    ranks += fmt::format("{}{}", count++ == 0 ? "" : ", ", rank);
  }
  if (count == 0) return {};
  return fmt::format("; missing node rank{} {}", count == 1 ? "" : "s", ranks);
}

// --- forming a group ---

void Coordinator::consider_start() {
  const auto count = static_cast<int>(nodes_.size());
  if (count < options_.nodes.min) return;
  if (count >= options_.nodes.max || generation_ >= 0) {
    form();
  } else {
    effects_.set_timer(Timer::join_window, options_.join_window);
  }
}

std::vector<Coordinator::Node> Coordinator::in_order() const {
  // Nodes that were given a rank take that place; the others fill the gaps as they came.
  std::vector<Node> with, without;
  for (const auto& [node, info] : nodes_) (info.wanted_rank >= 0 ? with : without).push_back(node);
  std::sort(with.begin(), with.end(), [&](Node a, Node b) { return nodes_.at(a).wanted_rank < nodes_.at(b).wanted_rank; });
  std::vector<Node> order;
  auto next = without.begin();
  for (const Node node : with) {
    while (next != without.end() && static_cast<int>(order.size()) < nodes_.at(node).wanted_rank) order.push_back(*next++);
    order.push_back(node);
  }
  order.insert(order.end(), next, without.end());
  return order;
}

void Coordinator::form() {
  for (const Timer timer : {Timer::join_timeout, Timer::join_window, Timer::reminder}) effects_.stop_timer(timer);
  ++generation_;
  exits_.clear();
  left_.reset();
  waiting_.reset();
  failure_code_.reset();
  int rank = 0;
  world_size_ = 0;
  const std::vector<Node> order = in_order();
  for (const Node node : order) {
    NodeInfo& info = nodes_.at(node);
    info.node_rank = rank++;
    info.finished = false;
    info.stopped = false;
    world_size_ += info.processes;
  }
  state_ = State::reserving;
  AgentMessage reserve{.kind = Kind::reserve};
  reserve.generation = generation_;
  effects_.send(order.front(), reserve);
}

void Coordinator::start_all(const AgentMessage& reserved) {
  state_ = State::running;
  AgentMessage start{.kind = Kind::start};
  start.generation = generation_;
  start.restarts = restarts_;
  start.node_count = static_cast<int>(nodes_.size());
  start.world_size = world_size_;
  start.host = reserved.host;
  start.port = reserved.port;
  std::map<std::string, int> sharing, placed;  // ranks at each place: all, and those that have their cores
  for (const auto& [node, info] : nodes_) {
    if (info.node_rank >= 0) sharing[info.core_place] += info.processes;
  }
  for (const Node node : in_order()) {
    const auto found = nodes_.find(node);
    if (found == nodes_.end() || found->second.node_rank < 0) continue;
    start.node_rank = found->second.node_rank;
    start.processes = found->second.processes;
    start.devices_per_process = found->second.devices_per_process;
    start.core_total = sharing[found->second.core_place];
    start.core_first = std::exchange(placed[found->second.core_place], placed[found->second.core_place] + start.processes);
    start.node_count = 0;
    for (const auto& [other, info] : nodes_) start.node_count += info.node_rank >= 0 ? 1 : 0;
    effects_.send(node, start);
    start.first_rank += start.processes;
    if (state_ != State::running) return;  // the first node could not even start
  }
  // Somebody came while the port was being found.
  const bool late = std::any_of(nodes_.begin(), nodes_.end(), [](const auto& entry) { return entry.second.node_rank < 0; });
  if (late) stop_all(SIGTERM, options_.grace);
}

// --- while it runs ---

void Coordinator::received(Node node, const AgentMessage& message) {
  if (message.kind == Kind::interrupt) {
    if (leave(node, message.signal)) return;
    return interrupt(message.signal, nodes_.count(node) != 0 ? nodes_.at(node).host : std::string());
  }
  if (message.kind == Kind::signal) return pass_on(node, message.signal, message.host);
  const auto found = nodes_.find(node);
  if (found == nodes_.end() || message.generation != generation_) return;
  switch (message.kind) {
    case Kind::reserved:
      if (state_ != State::reserving) return;
      if (message.port == 0) return quit(kUnusable, message.text);
      start_all(message);
      return;
    case Kind::failed:
      if (state_ != State::running) return;
      exits_.push_back(message.exit);
      exits_.back().host = found->second.host;
      if (exits_.size() == 1 || !cause_may_follow(exits_)) {
        effects_.set_timer(Timer::verdict, cause_may_follow(exits_) ? kVerdictPatience
                                         : nodes_.size() > 1      ? kVerdictNodes
                                                                  : kVerdictSoon);
      }
      return;
    case Kind::left:
      if (!left_) {
        left_ = message.exit;
        left_->host = found->second.host;
      }
      return consider_absent();
    case Kind::waits:
      waiting_ = message.exit.rank;
      return consider_absent();
    case Kind::finished:
      found->second.finished = true;
      if (state_ == State::running && std::all_of(nodes_.begin(), nodes_.end(),
                                                  [](const auto& entry) { return entry.second.finished; })) {
        quit(0, {});
      }
      return;
    case Kind::stopped:
      found->second.stopped = true;
      if (state_ == State::stopping) consider_stopped();
      return;
    default: return;
  }
}

/// A rank that has ended will not join any more: who waits for it would do so until the join time-out.
void Coordinator::consider_absent() {
  if (state_ != State::running || !left_ || !waiting_) return;
  left_->cause = fmt::format(
      "before it joined the group, and rank {} waits for it in init(): every rank must join, or the job have fewer ranks",
      *waiting_);
  exits_.push_back(*std::exchange(left_, std::nullopt));
  decide();
}

void Coordinator::decide() {
  if (state_ != State::running || exits_.empty()) return;
  const RankExit& cause = exits_[first_cause(exits_)];
  failure_code_ = cause.exit_code();
  ++failures_;
  std::string text = describe_failure(cause, world_size_);
  if (options_.restarts.max_restarts > 0 && options_.restarts.allows(failures_)) {
    text += fmt::format("\nmaniple: starting the group again (restart {} of {})", failures_,
                        options_.restarts.max_restarts);
  }
  effects_.say(text);
  tell_all(text);
  stop_all(SIGTERM, options_.grace);
}

/// To the users of the other launchers.
void Coordinator::tell_all(const std::string& text) {
  AgentMessage verdict{.kind = Kind::verdict};
  verdict.text = text;
  for (const auto& [node, info] : nodes_) effects_.send(node, verdict);
}

void Coordinator::stop_all(int signal, std::chrono::duration<double> grace) {
  effects_.stop_timer(Timer::verdict);
  state_ = State::stopping;
  AgentMessage stop{.kind = Kind::stop};
  stop.generation = generation_;
  stop.signal = signal;
  stop.grace_ms = static_cast<int>(std::min(grace.count(), 1e6) * 1000);
  std::vector<Node> told;
  for (const auto& [node, info] : nodes_) {
    if (info.node_rank >= 0 && !info.stopped) told.push_back(node);
  }
  for (const Node node : told) effects_.send(node, stop);
  consider_stopped();
}

void Coordinator::consider_stopped() {
  if (state_ != State::stopping) return;
  for (const auto& [node, info] : nodes_) {
    if (info.node_rank >= 0 && !info.stopped) return;
  }
  for (auto& [node, info] : nodes_) info.node_rank = -1;
  dismiss_leaving();
  if (interrupted_ != 0) return quit(128 + interrupted_, {});
  if (!failure_code_) {
    state_ = State::gathering;
    return consider_start();
  }
  if (!options_.restarts.allows(failures_)) return quit(*failure_code_, {});
  state_ = State::pausing;
  effects_.set_timer(Timer::pause, options_.restarts.delay_before(failures_));
}

void Coordinator::on_timer(Timer timer) {
  switch (timer) {
    case Timer::verdict: return decide();
    case Timer::join_window:
      if (state_ == State::gathering && nodes_.size() >= static_cast<std::size_t>(options_.nodes.min)) form();
      return;
    case Timer::pause:
      state_ = State::gathering;
      ++restarts_;
      begin();
      if (nodes_.size() < static_cast<std::size_t>(options_.nodes.min) && effects_.summon) effects_.summon();
      return consider_start();
    case Timer::reminder:
      if (state_ == State::gathering) {
        effects_.say(fmt::format("maniple: waiting: {} of {} nodes joined{}", nodes_.size(), options_.nodes.min, missing()));
      }
      return;
    case Timer::join_timeout:
      if (state_ == State::gathering) {
        quit(1, fmt::format("maniple: {} of {} nodes joined within {:.0f} s{}; {}, or raise --join-timeout", nodes_.size(),
                            options_.nodes.min, options_.join_timeout.count(), missing(),
                            options_.summons ? "their agents were started but did not call back: try `maniple doctor --hosts`"
                                             : "start `maniple run` on every node with the same --master"));
      }
      return;
  }
}

/// A machine that is taken away is told so by SIGTERM. False: the job needs the node.
bool Coordinator::leave(Node node, int signal) {
  const auto found = nodes_.find(node);
  if (found == nodes_.end() || state_ == State::done || signal != SIGTERM || interrupted_ != 0) return false;
  NodeInfo& info = found->second;
  if (info.leaving != 0) return true;
  const auto staying = std::count_if(nodes_.begin(), nodes_.end(), [](const auto& entry) { return entry.second.leaving == 0; }) - 1;
  if (!options_.nodes.elastic() || staying < options_.nodes.min) return false;
  info.leaving = signal;
  const bool forms = state_ == State::running || state_ == State::reserving;
  effects_.say(fmt::format("maniple: host {} leaves the job ({} to its launcher){}", info.host, signal_name(signal),
                         forms ? fmt::format("; the group is formed anew with {}", staying) : ""));
  if (forms) {
    stop_all(SIGTERM, options_.interrupt_grace);
  } else if (state_ != State::stopping) {
    dismiss_leaving();
  }
  return true;
}

void Coordinator::dismiss_leaving() {
  for (auto entry = nodes_.begin(); entry != nodes_.end();) {
    const auto [node, info] = *entry++;
    if (info.leaving == 0) continue;
    AgentMessage farewell{.kind = Kind::quit};
    farewell.code = 128 + info.leaving;
    farewell.text = fmt::format("maniple: {}: this node has left the job, which goes on without it", signal_name(info.leaving));
    nodes_.erase(node);
    effects_.send(node, farewell);
  }
}

void Coordinator::interrupt(int signal, const std::string& host) {
  if (state_ == State::done) return;
  const bool again = interrupted_ != 0;
  if (!again) interrupted_ = signal;
  if (!again && nodes_.size() > 1) {
    const std::string text = fmt::format("maniple: {}{} ends the job on all nodes", signal_name(signal),
                                         host.empty() ? "" : fmt::format(" on host {}", host));
    effects_.say(text);
    tell_all(text);
  }
  if (state_ == State::gathering || state_ == State::pausing) return quit(128 + interrupted_, {});
  if (again) return stop_all(SIGKILL, Seconds(0));
  if (signal == SIGINT) {
    effects_.say(fmt::format("maniple: interrupted; workers have {:.0f} s to finish (press Ctrl-C again to end at once)",
                           options_.interrupt_grace.count()));
  }
  if (state_ != State::stopping) stop_all(signal, options_.interrupt_grace);
}

void Coordinator::pass_on(Node from, int signal, const std::string& host) {
  AgentMessage message{.kind = Kind::signal};
  message.signal = signal;
  std::vector<Node> all;
  for (const auto& [node, info] : nodes_) all.push_back(node);
  const std::string news = signal == SIGSTOP   ? fmt::format("maniple: suspended on host {}; `fg` there continues the job", host)
                           : signal == SIGCONT ? fmt::format("maniple: continued on host {}", host)
                                               : std::string();
  const bool several = all.size() > 1;
  for (const Node node : all) {
    message.text = node == from || !several ? std::string() : news;
    effects_.send(node, message);
  }
}

void Coordinator::fail(const std::string& text, int code) {
  if (state_ == State::done || interrupted_ != 0) return;
  if (!text.empty()) effects_.say(text);
  interrupted_ = code - 128;  // ends like an interruption: no restart, this code
  if (state_ == State::running || state_ == State::reserving) return stop_all(SIGTERM, options_.grace);
  if (state_ != State::stopping) quit(code, {});
}

void Coordinator::quit(int code, const std::string& text) {
  state_ = State::done;
  for (const Timer timer : {Timer::join_timeout, Timer::join_window, Timer::reminder, Timer::verdict, Timer::pause}) {
    effects_.stop_timer(timer);
  }
  AgentMessage message{.kind = Kind::quit};
  message.code = code;
  message.text = text;
  if (!text.empty()) effects_.say(text);
  std::vector<Node> all;
  for (const auto& [node, info] : nodes_) all.push_back(node);
  for (const Node node : all) effects_.send(node, message);
  effects_.done(code);
}

}  // namespace maniple::launch
