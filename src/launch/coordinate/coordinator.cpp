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

constexpr Seconds kReminder{5.0};

}  // namespace

Coordinator::Coordinator(CoordinatorOptions options, Effects effects)
    : options_(options), effects_(std::move(effects)) {}

void Coordinator::begin() {
  if (options_.nodes.max == 1 && !options_.starts_agents) return;
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
    if (join.node_rank >= 0 && info.requested_rank == join.node_rank) {
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
                          .core_set = join.text,
                          .requested_rank = join.node_rank,
                          .processes = join.processes,
                          .devices_per_process = join.devices_per_process};
  if (state_ == State::gathering) {
    check_start();
  } else if (state_ == State::running && failure_code_ == std::nullopt && interrupted_ == 0 && exits_.empty()) {
    effects_.print(
        fmt::format("maniple: host {} joins: the group is re-formed with {} nodes", join.host, nodes_.size()));
    stop_all(SIGTERM, options_.grace);
  }
}

void Coordinator::lost(Node node, const std::string& reason) {
  const auto found = nodes_.find(node);
  if (found == nodes_.end()) return;
  const NodeInfo info = found->second;
  nodes_.erase(found);
  if (state_ == State::done) return;
  if (info.node_rank < 0)
    return effects_.print(fmt::format("maniple: host {} was lost before the start: {}", info.host, reason));
  const std::string text = fmt::format("maniple: node {} (host {}) is lost: {}", info.node_rank, info.host, reason);
  if (state_ == State::reserving || state_ == State::running) {
    effects_.stop_timer(Timer::verdict);
    const bool enough = options_.nodes.elastic() && nodes_.size() >= static_cast<std::size_t>(options_.nodes.min);
    effects_.print(enough ? text + fmt::format("; the group is re-formed with {}", nodes_.size()) : text);
    if (!enough) {
      failure_code_ = 1;
      ++failures_;
      show_on_all(text);
    }
    stop_all(SIGTERM, options_.grace);
  } else if (state_ == State::stopping) {
    check_stopped();
  }
}

std::string Coordinator::missing() const {
  std::set<int> taken;
  for (const auto& [node, info] : nodes_) {
    if (info.requested_rank >= 0) taken.insert(info.requested_rank);
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

void Coordinator::check_start() {
  const auto count = static_cast<int>(nodes_.size());
  if (count < options_.nodes.min) return;
  if (count >= options_.nodes.max || generation_ >= 0) {
    form_group();
  } else {
    effects_.set_timer(Timer::join_window, options_.join_window);
  }
}

std::vector<Coordinator::Node> Coordinator::in_order() const {
  // Nodes with a --node-rank have that rank; the others fill the gaps in the order of arrival.
  std::vector<Node> with, without;
  for (const auto& [node, info] : nodes_) (info.requested_rank >= 0 ? with : without).push_back(node);
  std::sort(with.begin(), with.end(),
            [&](Node a, Node b) { return nodes_.at(a).requested_rank < nodes_.at(b).requested_rank; });
  std::vector<Node> order;
  auto next = without.begin();
  for (const Node node : with) {
    while (next != without.end() && static_cast<int>(order.size()) < nodes_.at(node).requested_rank)
      order.push_back(*next++);
    order.push_back(node);
  }
  order.insert(order.end(), next, without.end());
  return order;
}

void Coordinator::form_group() {
  for (const Timer timer : {Timer::join_timeout, Timer::join_window, Timer::reminder}) effects_.stop_timer(timer);
  ++generation_;
  exits_.clear();
  absent_.reset();
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
  std::map<std::string, int> sharing, placed;  // ranks on each set of cores: all, and those that have theirs
  for (const auto& [node, info] : nodes_) {
    if (info.node_rank >= 0) sharing[info.core_set] += info.processes;
  }
  for (const Node node : in_order()) {
    const auto found = nodes_.find(node);
    if (found == nodes_.end() || found->second.node_rank < 0) continue;
    start.node_rank = found->second.node_rank;
    start.processes = found->second.processes;
    start.devices_per_process = found->second.devices_per_process;
    start.core_total = sharing[found->second.core_set];
    start.core_first = std::exchange(placed[found->second.core_set], placed[found->second.core_set] + start.processes);
    start.node_count = 0;
    for (const auto& [other, info] : nodes_) start.node_count += info.node_rank >= 0 ? 1 : 0;
    effects_.send(node, start);
    start.first_rank += start.processes;
    if (state_ != State::running) return;  // the first node could not even start
  }
  // A node joined while the port was being reserved.
  const bool late =
      std::any_of(nodes_.begin(), nodes_.end(), [](const auto& entry) { return entry.second.node_rank < 0; });
  if (late) stop_all(SIGTERM, options_.grace);
}

void Coordinator::on_timer(Timer timer) {
  switch (timer) {
    case Timer::verdict: return decide();
    case Timer::join_window:
      if (state_ == State::gathering && nodes_.size() >= static_cast<std::size_t>(options_.nodes.min)) form_group();
      return;
    case Timer::restart:
      state_ = State::gathering;
      ++restarts_;
      begin();
      if (nodes_.size() < static_cast<std::size_t>(options_.nodes.min) && effects_.start_agents)
        effects_.start_agents();
      return check_start();
    case Timer::reminder:
      if (state_ == State::gathering) {
        effects_.print(
            fmt::format("maniple: waiting: {} of {} nodes joined{}", nodes_.size(), options_.nodes.min, missing()));
      }
      return;
    case Timer::join_timeout:
      if (state_ == State::gathering) {
        quit(1, fmt::format("maniple: timed out after {:.0f} s: {} of {} nodes joined{}; {}, or raise --join-timeout",
                            options_.join_timeout.count(), nodes_.size(), options_.nodes.min, missing(),
                            options_.starts_agents
                                ? "their agents were started but did not connect back: try `maniple doctor --hosts`"
                                : "start `maniple run` on every node with the same --master"));
      }
      return;
  }
}

}  // namespace maniple::launch
