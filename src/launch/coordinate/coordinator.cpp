#include "launch/coordinate/coordinator.h"

#include <algorithm>
#include <csignal>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

namespace maniple::launch {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kReminder{5.0};

}  // namespace

std::vector<Effect> Coordinator::handle(const Event& event, Time now) {
  now_ = now;
  std::visit([this](const auto& happened) { on(happened); }, event);
  return std::exchange(effects_, {});
}

std::optional<Coordinator::Time> Coordinator::next_timer() const {
  std::optional<Time> next;
  for (const auto& [timer, due] : timers_) next = next ? std::min(*next, due) : due;
  return next;
}

void Coordinator::on(const event::Tick&) {
  for (;;) {
    const auto first = std::min_element(timers_.begin(), timers_.end(),
                                        [](const auto& a, const auto& b) { return a.second < b.second; });
    if (first == timers_.end() || first->second > now_) return;
    const Timer timer = first->first;
    timers_.erase(first);
    on_timer(timer);
  }
}

/// The only way to change the job's state: stops the old state's timers and starts the new state's.
void Coordinator::enter(State state) {
  timers_.clear();
  state_ = state;
  if (state == State::gathering && (options_.nodes.max > 1 || options_.starts_agents)) {
    set_timer(Timer::join_timeout, options_.join_timeout);
    set_timer(Timer::reminder, kReminder);
  }
  if (state == State::restart_delay) set_timer(Timer::restart, options_.restarts.delay_before(failures_));
}

/// The only way to change a node's state.
void Coordinator::move(Node node, NodeState state) {
  NodeInfo& info = nodes_.at(node);
  if (info.state == NodeState::leaving && state == NodeState::stopping) return;  // it leaves all the same
  info.state = state;
}

/// The number of nodes available to the next group.
int Coordinator::staying() const {
  return static_cast<int>(std::count_if(nodes_.begin(), nodes_.end(),
                                        [](const auto& entry) { return entry.second.state != NodeState::leaving; }));
}

// --- membership ---

std::string Coordinator::refusal(const message::Join& join) const {
  if (state_ == State::done) return "the job has ended";
  if (join.max_nodes != 0 && (join.min_nodes != options_.nodes.min || join.max_nodes != options_.nodes.max)) {
    return fmt::format("--nnodes is {}:{} there but {}:{} at the master; give all nodes the same", join.min_nodes,
                       join.max_nodes, options_.nodes.min, options_.nodes.max);
  }
  if (join.max_nodes != 0 && (join.min_workers != options_.elastic.min || join.max_workers != options_.elastic.max)) {
    const auto text = [](int least, int most) {
      return least == 0 ? std::string("not given") : fmt::format("{}:{}", least, most);
    };
    return fmt::format("--elastic is {} there but {} at the master; give all nodes the same",
                       text(join.min_workers, join.max_workers), text(options_.elastic.min, options_.elastic.max));
  }
  if (is_training() && elastic_.active() >= options_.elastic.max) {
    return fmt::format("the job has all of its {} workers already (--elastic)", options_.elastic.max);
  }
  if (state_ == State::running && !first_done_.empty()) {
    return fmt::format("{} has finished already, and what has finished does not run again; start another job",
                       first_done_);
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

void Coordinator::on(const event::Joined& event) {
  const message::Join& join = event.join;
  if (const std::string reason = refusal(join); !reason.empty()) {
    return send(event.node, message::Quit{.code = 1,
                                          .text = fmt::format("maniple: the master refuses this node (host {}): {}",
                                                              join.host, reason)});
  }
  nodes_[event.node] = NodeInfo{.host = join.host,
                                .core_set = join.core_set,
                                .requested_rank = join.node_rank,
                                .processes = join.processes,
                                .devices_per_process = join.devices_per_process};
  lost_hosts_.erase(join.host);
  if (state_ == State::gathering) return check_start();
  if (is_training()) return admit(event.node);
  if (state_ == State::reserving) return stop_all(SIGTERM, options_.grace);  // nothing runs yet: regroups at once
  if (state_ == State::running && exits_.empty()) {
    print(fmt::format("maniple: host {} joins: the group is re-formed with {} nodes", join.host, nodes_.size()));
    stop_all(SIGTERM, options_.grace);
  }
}

void Coordinator::on(const event::Lost& event) {
  const std::string& reason = event.reason;
  const auto found = nodes_.find(event.node);
  if (found == nodes_.end()) return;
  const NodeInfo info = found->second;
  nodes_.erase(found);
  if (state_ == State::done) return;
  lost_hosts_.insert(info.host);
  std::string text = info.node_rank >= 0
                         ? fmt::format("maniple: node {} (host {}) is lost: {}", info.node_rank, info.host, reason)
                         : fmt::format("maniple: host {} was lost before the start: {}", info.host, reason);
  if (is_training()) return lose_elastic(event.node, info, text);
  const bool forms = state_ == State::reserving || state_ == State::running || state_ == State::stopping;
  // The job does not need nodes that have finished or are leaving, nor late ones while a complete group runs.
  const bool needed = info.state == NodeState::assigned || info.state == NodeState::running ||
                      info.state == NodeState::stopping || (state_ == State::stopping && !info.in_group());
  if (!forms || !needed || next_ == Next::quit) {
    print(text);
  } else if (staying() >= options_.nodes.min) {
    print(text + (next_ == Next::regroup ? fmt::format("; the group is re-formed with {}", staying()) : ""));
  } else {
    if (options_.nodes.elastic()) {
      text += fmt::format("; nodes left: {}, --nnodes needs {} or more", staying(), options_.nodes.min);
    }
    follow(Next::restart_if_allowed, 1);
    print(text);
    show_on_all(text);
  }
  switch (state_) {
    case State::reserving:
    case State::running:
      if (needed) return stop_all(SIGTERM, options_.grace);
      return check_finished();
    case State::stopping: return check_stopped();
    case State::gathering: effects_.emplace_back(effect::StartAgents()); return;
    default: return;
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
  if (count > 0) return fmt::format("; missing node rank{} {}", count == 1 ? "" : "s", ranks);
  if (lost_hosts_.empty()) return {};
  return fmt::format("; lost: host{} {}", lost_hosts_.size() == 1 ? "" : "s", fmt::join(lost_hosts_, ", "));
}

// --- forming a group ---

void Coordinator::check_start() {
  const auto count = static_cast<int>(nodes_.size());
  if (count < options_.nodes.min) return;
  if (count >= options_.nodes.max || generation_ >= 0) {
    form_group();
  } else {
    set_timer(Timer::join_window, options_.join_window);
  }
}

std::vector<Node> Coordinator::in_order() const {
  // Nodes with --node-rank get that rank; the others fill the gaps in order of arrival.
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
  ++generation_;
  lost_hosts_.clear();
  exits_.clear();
  ended_.clear();
  absent_.reset();
  waiting_.reset();
  first_done_.clear();
  next_ = Next::regroup;
  int rank = 0;
  world_size_ = 0;
  const std::vector<Node> order = in_order();
  for (const Node node : order) {
    NodeInfo& info = nodes_.at(node);
    info.node_rank = rank++;
    world_size_ += info.processes;
    move(node, NodeState::assigned);
  }
  if (options_.elastic && (world_size_ < options_.elastic.min || world_size_ > options_.elastic.max)) {
    return quit(2, fmt::format("maniple: --elastic is {}:{}, and {} nodes start {} processes; expected a number in "
                               "that range",
                               options_.elastic.min, options_.elastic.max, nodes_.size(), world_size_));
  }
  enter(State::reserving);
  send(order.front(), message::Reserve{.generation = generation_});
}

void Coordinator::start_all(const message::Reserved& reserved) {
  enter(State::running);
  if (options_.elastic) begin_elastic(reserved);
  message::Start start{.generation = generation_,
                       .restarts = restarts_,
                       .node_count = static_cast<int>(nodes_.size()),
                       .world_size = world_size_,
                       .host = reserved.host,
                       .port = reserved.port};
  std::map<std::string, int> sharing, placed;  // ranks per core set: total, and assigned so far
  for (const auto& [node, info] : nodes_) sharing[info.core_set] += info.processes;
  for (const Node node : in_order()) {
    const NodeInfo& info = nodes_.at(node);
    start.node_rank = info.node_rank;
    start.processes = info.processes;
    start.devices_per_process = info.devices_per_process;
    start.core_total = sharing[info.core_set];
    start.core_first = std::exchange(placed[info.core_set], placed[info.core_set] + start.processes);
    move(node, NodeState::running);
    if (options_.elastic) elastic_.add_node(node, info.processes, now_);
    send(node, start);
    start.first_rank += start.processes;
  }
}

void Coordinator::on_timer(Timer timer) {
  switch (timer) {
    case Timer::verdict: return decide();
    case Timer::members: return carry_out(elastic_.on_time(now_));
    case Timer::join_window:
      if (state_ == State::gathering && nodes_.size() >= static_cast<std::size_t>(options_.nodes.min)) form_group();
      return;
    case Timer::restart:
      ++restarts_;
      enter(State::gathering);
      if (nodes_.size() < static_cast<std::size_t>(options_.nodes.min)) effects_.emplace_back(effect::StartAgents());
      return check_start();
    case Timer::reminder:
      if (state_ == State::gathering && static_cast<int>(nodes_.size()) < options_.nodes.min) {
        print(fmt::format("maniple: waiting: {} of {} nodes joined{}", nodes_.size(), options_.nodes.min, missing()));
      }
      return;
    case Timer::join_timeout:
      if (state_ == State::gathering) {
        if (static_cast<int>(nodes_.size()) >= options_.nodes.min) return form_group();  // join_window is still running
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
