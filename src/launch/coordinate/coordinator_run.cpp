// The coordinator while the group runs: failures, signals, stopping the job.
#include <algorithm>
#include <csignal>
#include <utility>

#include <fmt/format.h>

#include "launch/coordinate/coordinator.h"

namespace maniple::launch {
namespace {

using Seconds = std::chrono::duration<double>;

// Ranks that wait for a dead rank fail milliseconds after it. The delays leave time to see the cause itself.
constexpr Seconds kVerdictForCause{0.15};
constexpr Seconds kVerdictSoon{0.01};
constexpr Seconds kVerdictNodes{0.05};
constexpr int kUsage = 2;  // exit code: a port that cannot be used

}  // namespace

void Coordinator::on(const event::Received& event) {
  const auto known = [&](const auto& message) {
    if constexpr (requires { on_message(event.node, message); }) on_message(event.node, message);
  };
  std::visit(known, event.message);
}

/// Whether the message is from a node of the current group, about its current generation.
bool Coordinator::is_current(Node node, int generation) const {
  return nodes_.count(node) != 0 && generation == generation_;
}

void Coordinator::on_message(Node node, const message::Interrupt& message) {
  const auto found = nodes_.find(node);
  if (found == nodes_.end()) return;  // it was refused, or has left already
  const std::string host = found->second.host;
  if (!leave(node, message.signal)) interrupt(message.signal, host);
}

void Coordinator::on_message(Node node, const message::Reserved& message) {
  if (!is_current(node, message.generation)) return;
  if (is_training()) return publish(message);
  if (state_ != State::reserving) return;
  if (message.port == 0) return quit(kUsage, message.error);
  start_all(message);
}

void Coordinator::on_message(Node node, const message::Failed& message) {
  if (!is_current(node, message.generation) || state_ != State::running) return;
  if (options_.elastic && message.exit.pid >= 0) return carry_out(elastic_.on_exit(message.exit, now_));
  if (options_.elastic && elastic_.generation() > 0) {  // a node that joined late could not start its workers
    const std::string text = describe_failure(message.exit, world_size());
    nodes_.erase(node);
    send(node, message::Quit{.code = message.exit.exit_code(), .text = text});
    print(text);
    return carry_out(elastic_.on_node_gone(node, /*left=*/false, now_));
  }
  exits_.push_back(message.exit);
  exits_.back().host = nodes_.at(node).host;
  if (exits_.size() == 1 || !cause_may_follow(exits_)) {
    set_timer(Timer::verdict, cause_may_follow(exits_) ? kVerdictForCause
                              : nodes_.size() > 1      ? kVerdictNodes
                                                       : kVerdictSoon);
  }
}

void Coordinator::on_message(Node node, const message::Absent& message) {
  if (!is_current(node, message.generation)) return;
  if (!absent_) {
    absent_ = message.exit;
    absent_->host = nodes_.at(node).host;
  }
  check_absent();
}

void Coordinator::on_message(Node node, const message::Waiting& message) {
  if (!is_current(node, message.generation)) return;
  waiting_ = message.rank;
  check_absent();
}

void Coordinator::on_message(Node node, const message::Exited& message) {
  if (!is_current(node, message.generation)) return;
  ended_.push_back(message.exit);
  ended_.back().host = nodes_.at(node).host;
  if (first_done_.empty()) first_done_ = fmt::format("rank {} (host {})", message.exit.rank, nodes_.at(node).host);
  if (is_training()) carry_out(elastic_.on_exit(message.exit, now_));
}

void Coordinator::on_message(Node node, const message::Finished& message) {
  if (!is_current(node, message.generation)) return;
  const NodeInfo& info = nodes_.at(node);
  if (info.state != NodeState::running) return;  // it was sent `Stop` and will reply `Stopped`
  if (first_done_.empty()) first_done_ = fmt::format("node {} (host {})", info.node_rank, info.host);
  move(node, NodeState::finished);
  check_finished();
}

void Coordinator::on_message(Node node, const message::Stopped& message) {
  if (!is_current(node, message.generation)) return;
  if (is_training() && nodes_.at(node).state == NodeState::leaving) {
    release(node);
    return carry_out(elastic_.on_node_gone(node, /*left=*/true, now_));
  }
  if (state_ != State::stopping) return;
  if (nodes_.at(node).state == NodeState::leaving) {
    release(node);
  } else {
    move(node, NodeState::idle);
  }
  check_stopped();
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
  print(text);
  show_on_all(text);
  stop_all(SIGTERM, options_.grace, {cause.rank, unseen});
}

/// Shows the text to the other launchers' users.
void Coordinator::show_on_all(const std::string& text) {
  for (const auto& [node, info] : nodes_) send(node, message::Verdict{.text = text});
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

/// Stops all nodes. Does not wait for nodes on which nothing was started. `reported`: see WorkerGroup::end.
void Coordinator::stop_all(int signal, std::chrono::duration<double> grace, std::vector<int> reported) {
  enter(State::stopping);
  const message::Stop stop{.generation = generation_,
                           .signal = signal,
                           .grace_ms = static_cast<int>(std::min(grace.count(), 1e6) * 1000),
                           .reported = std::move(reported)};
  std::vector<Node> with_workers;
  for (const auto& [node, info] : nodes_) {
    if (info.has_workers()) with_workers.push_back(node);
    move(node, info.has_workers() ? NodeState::stopping : NodeState::idle);
  }
  for (const Node node : with_workers) send(node, stop);
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
  if (is_training()) return leave_elastic(node, signal);
  if (!options_.nodes.elastic() || staying() - 1 < options_.nodes.min) return false;
  const bool forms = info.state == NodeState::assigned || info.state == NodeState::running;
  print(fmt::format("maniple: host {} leaves the job ({} to its launcher){}", info.host, signal_name(signal),
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
  nodes_.erase(node);
  send(node, message::Quit{.code = 128 + SIGTERM,
                           .text = fmt::format("maniple: {}: this node has left the job, which goes on without it",
                                               signal_name(SIGTERM))});
}

void Coordinator::interrupt(int signal, const std::string& host) {
  if (state_ == State::done) return;
  const bool again = next_ == Next::quit;
  follow(Next::quit, 128 + signal);
  if (!again && nodes_.size() > 1) {
    const std::string text = fmt::format("maniple: {}{} ends the job on all nodes", signal_name(signal),
                                         host.empty() ? "" : fmt::format(" on host {}", host));
    print(text);
    show_on_all(text);
  }
  const bool waits_for_workers =
      std::any_of(nodes_.begin(), nodes_.end(), [](const auto& entry) { return entry.second.has_workers(); });
  if (!waits_for_workers) return quit(code_, {});
  if (again) return stop_all(SIGKILL, Seconds(0));
  if (signal == SIGINT) {
    print(fmt::format("maniple: interrupted; workers have {:.0f} s to finish (Ctrl-C again ends them at once)",
                      options_.interrupt_grace.count()));
  }
  if (state_ != State::stopping) stop_all(signal, options_.interrupt_grace);
}

void Coordinator::on(const event::PassOn& event) {
  const std::string notice =
      event.signal == SIGSTOP   ? fmt::format("maniple: suspended on host {}; `fg` there continues the job", event.host)
      : event.signal == SIGCONT ? fmt::format("maniple: continued on host {}", event.host)
                                : std::string();
  const bool several = nodes_.size() > 1;
  for (const auto& [node, info] : nodes_) {
    send(node,
         message::Signal{.signal = event.signal, .text = node == event.from || !several ? std::string() : notice});
  }
}

void Coordinator::on(const event::Broken& event) {
  if (state_ == State::done || next_ == Next::quit) return;
  if (!event.text.empty()) print(event.text);
  follow(Next::quit, event.code);  // ends like an interruption: without a restart, with this code
  if (state_ != State::stopping) stop_all(SIGTERM, options_.grace);
}

void Coordinator::quit(int code, const std::string& text) {
  enter(State::done);
  if (!text.empty()) print(text);
  for (const auto& [node, info] : nodes_) send(node, message::Quit{.code = code, .text = text});
  effects_.emplace_back(effect::Done{code});
}

}  // namespace maniple::launch
