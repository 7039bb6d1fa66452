// The coordinator while the group runs: failures, signals, stopping the job.
#include <algorithm>
#include <csignal>
#include <utility>

#include <fmt/format.h>

#include "launch/coordinate/coordinator.h"

namespace maniple::launch {
namespace {

using Kind = AgentMessage::Kind;
using Seconds = std::chrono::duration<double>;

// Ranks that wait for a dead rank fail milliseconds after it. The delays leave time to see the cause itself.
constexpr Seconds kVerdictForCause{0.15};
constexpr Seconds kVerdictSoon{0.01};
constexpr Seconds kVerdictNodes{0.05};
constexpr int kUsage = 2;  // exit code: a port that cannot be used

}  // namespace

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
      if (message.port == 0) return quit(kUsage, message.text);
      start_all(message);
      return;
    case Kind::failed:
      if (state_ != State::running) return;
      exits_.push_back(message.exit);
      exits_.back().host = found->second.host;
      if (exits_.size() == 1 || !cause_may_follow(exits_)) {
        effects_.set_timer(Timer::verdict, cause_may_follow(exits_) ? kVerdictForCause
                                           : nodes_.size() > 1      ? kVerdictNodes
                                                                    : kVerdictSoon);
      }
      return;
    case Kind::absent:
      if (!absent_) {
        absent_ = message.exit;
        absent_->host = found->second.host;
      }
      return check_absent();
    case Kind::waiting: waiting_ = message.exit.rank; return check_absent();
    case Kind::exited:
      ended_.push_back(message.exit);
      ended_.back().host = found->second.host;
      if (first_done_.empty()) first_done_ = fmt::format("rank {} (host {})", message.exit.rank, found->second.host);
      return;
    case Kind::finished:
      if (found->second.state != NodeState::running) return;  // it was sent `stop` and will reply `stopped`
      move(node, NodeState::finished);
      if (first_done_.empty()) {
        first_done_ = fmt::format("node {} (host {})", found->second.node_rank, found->second.host);
      }
      return check_finished();
    case Kind::stopped:
      if (state_ != State::stopping) return;
      if (found->second.state == NodeState::leaving) {
        release(node);
      } else {
        move(node, NodeState::idle);
      }
      return check_stopped();
    default: return;
  }
}

/// Fails a rank that exited without calling init(): the other ranks would wait for it until init() times out.
void Coordinator::check_absent() {
  if (state_ != State::running || !absent_ || !waiting_) return;
  absent_->cause = fmt::format(
      "before it called init(), where rank {} waits for it: every rank must call init(), or the job have fewer ranks",
      *waiting_);
  exits_.push_back(*std::exchange(absent_, std::nullopt));
  decide();
}

void Coordinator::decide() {
  if (state_ != State::running || exits_.empty()) return;
  const RankExit& cause = exits_[first_cause(exits_)];
  follow(Next::restart_if_allowed, cause.exit_code());
  const int unseen = unseen_cause(exits_);
  std::string text = describe_failure(cause, world_size_, unseen, early_end(exits_, ended_));
  if (options_.restarts.max_restarts > 0 && options_.restarts.allows(failures_)) {
    text += fmt::format("\nmaniple: starting the group again (restart {} of {})", failures_,
                        options_.restarts.max_restarts);
  }
  effects_.print(text);
  show_on_all(text);
  stop_all(SIGTERM, options_.grace, cause.rank, unseen);
}

/// Shows the text to the other launchers' users.
void Coordinator::show_on_all(const std::string& text) {
  AgentMessage verdict{.kind = Kind::verdict};
  verdict.text = text;
  for (const auto& [node, info] : nodes_) effects_.send(node, verdict);
}

void Coordinator::check_finished() {
  if (state_ != State::running) return;
  const bool all = std::all_of(nodes_.begin(), nodes_.end(), [](const auto& entry) {
    return entry.second.state == NodeState::finished || !entry.second.in_group();
  });
  if (all) quit(0, {});
}

void Coordinator::follow(Next next, int code) {
  if (next <= next_) return;
  next_ = next;
  code_ = code;
  if (next == Next::restart_if_allowed) ++failures_;
}

/// Stops all nodes. Does not wait for nodes on which nothing was started. `reported`, `unseen`: the ranks that were
/// shown as the cause, see WorkerGroup::end.
void Coordinator::stop_all(int signal, std::chrono::duration<double> grace, int reported, int unseen) {
  enter(State::stopping);
  AgentMessage stop{.kind = Kind::stop};
  stop.generation = generation_;
  stop.signal = signal;
  stop.exit.rank = reported;
  stop.exit.blamed = unseen;
  stop.grace_ms = static_cast<int>(std::min(grace.count(), 1e6) * 1000);
  std::vector<Node> with_workers;
  for (const auto& [node, info] : nodes_) {
    if (info.has_workers()) with_workers.push_back(node);
    move(node, info.has_workers() ? NodeState::stopping : NodeState::idle);
  }
  for (const Node node : with_workers) effects_.send(node, stop);
  check_stopped();
}

void Coordinator::check_stopped() {
  if (state_ != State::stopping) return;
  for (const auto& [node, info] : nodes_) {
    if (info.has_workers()) return;
  }
  if (next_ == Next::quit) return quit(code_, {});
  if (next_ == Next::regroup) {
    enter(State::gathering);
    return check_start();
  }
  if (!options_.restarts.allows(failures_)) return quit(code_, {});
  enter(State::restart_delay);
}

/// Handles SIGTERM to a node's launcher, for instance from a scheduler that withdraws the machine. False: the job needs
/// the node.
bool Coordinator::leave(Node node, int signal) {
  const auto found = nodes_.find(node);
  if (found == nodes_.end() || state_ == State::done || signal != SIGTERM || next_ == Next::quit) return false;
  const NodeInfo& info = found->second;
  if (info.state == NodeState::leaving) return true;
  if (!options_.nodes.elastic() || staying() - 1 < options_.nodes.min) return false;
  const bool forms = info.state == NodeState::assigned || info.state == NodeState::running;
  effects_.print(fmt::format("maniple: host {} leaves the job ({} to its launcher){}", info.host, signal_name(signal),
                             forms ? fmt::format("; the group is re-formed with {}", staying() - 1) : ""));
  if (info.has_workers()) {
    move(node, NodeState::leaving);
  } else {
    release(node);
  }
  if (forms) {
    stop_all(SIGTERM, options_.interrupt_grace);
  } else {
    check_finished();
  }
  return true;
}

/// Releases a node whose launcher got SIGTERM; the job goes on.
void Coordinator::release(Node node) {
  AgentMessage quit{.kind = Kind::quit};
  quit.code = 128 + SIGTERM;
  quit.text = fmt::format("maniple: {}: this node has left the job, which goes on without it", signal_name(SIGTERM));
  nodes_.erase(node);
  effects_.send(node, quit);
}

void Coordinator::interrupt(int signal, const std::string& host) {
  if (state_ == State::done) return;
  const bool again = next_ == Next::quit;
  follow(Next::quit, 128 + signal);
  if (!again && nodes_.size() > 1) {
    const std::string text = fmt::format("maniple: {}{} ends the job on all nodes", signal_name(signal),
                                         host.empty() ? "" : fmt::format(" on host {}", host));
    effects_.print(text);
    show_on_all(text);
  }
  const bool waits_for_workers =
      std::any_of(nodes_.begin(), nodes_.end(), [](const auto& entry) { return entry.second.has_workers(); });
  if (!waits_for_workers) return quit(code_, {});
  if (again) return stop_all(SIGKILL, Seconds(0));
  if (signal == SIGINT) {
    effects_.print(fmt::format("maniple: interrupted; workers have {:.0f} s to finish (Ctrl-C again ends them at once)",
                               options_.interrupt_grace.count()));
  }
  if (state_ != State::stopping) stop_all(signal, options_.interrupt_grace);
}

void Coordinator::pass_on(Node from, int signal, const std::string& host) {
  AgentMessage message{.kind = Kind::signal};
  message.signal = signal;
  std::vector<Node> all;
  for (const auto& [node, info] : nodes_) all.push_back(node);
  const std::string notice = signal == SIGSTOP
                                 ? fmt::format("maniple: suspended on host {}; `fg` there continues the job", host)
                             : signal == SIGCONT ? fmt::format("maniple: continued on host {}", host)
                                                 : std::string();
  const bool several = all.size() > 1;
  for (const Node node : all) {
    message.text = node == from || !several ? std::string() : notice;
    effects_.send(node, message);
  }
}

void Coordinator::fail(const std::string& text, int code) {
  if (state_ == State::done || next_ == Next::quit) return;
  if (!text.empty()) effects_.print(text);
  follow(Next::quit, code);  // ends like an interruption: without a restart, with this code
  if (state_ != State::stopping) stop_all(SIGTERM, options_.grace);
}

void Coordinator::quit(int code, const std::string& text) {
  enter(State::done);
  AgentMessage message{.kind = Kind::quit};
  message.code = code;
  message.text = text;
  if (!text.empty()) effects_.print(text);
  std::vector<Node> all;
  for (const auto& [node, info] : nodes_) all.push_back(node);
  for (const Node node : all) effects_.send(node, message);
  effects_.done(code);
}

}  // namespace maniple::launch
