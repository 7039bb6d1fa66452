// The coordinator of an elastic job: carries out what ElasticMembers decides, and lets nodes come and go.
#include <algorithm>
#include <csignal>
#include <utility>

#include <fmt/format.h>

#include "launch/coordinate/coordinator.h"

namespace maniple::launch {

void Coordinator::begin_elastic(const message::Reserved& reserved) {
  elastic_.begin();
  forming_.reset();
  ends_with_.reset();
  first_address_ = reserved;
}

void Coordinator::on_message(Node node, const message::Noticed& message) {
  if (!is_current(node, message.generation) || !is_training()) return;
  const WorkerNotice& notice = message.notice;
  switch (notice.kind) {
    case WorkerNotice::Kind::ready: return carry_out(elastic_.on_ready(notice.rank, now_));
    case WorkerNotice::Kind::joined: return carry_out(elastic_.on_joined(notice.rank, now_));
    case WorkerNotice::Kind::leaving: return carry_out(elastic_.on_leaving(notice.rank, now_));
    case WorkerNotice::Kind::lost:
      return carry_out(elastic_.on_lost(notice.rank, notice.generation, notice.lost, now_));
  }
}

void Coordinator::carry_out(const MemberActions& actions) {
  timers_.erase(Timer::members);
  if (const auto next = elastic_.next_timer()) timers_[Timer::members] = *next;
  for (const MemberAction& action : actions) {
    std::visit([this](const auto& wanted) { carry_out(wanted); }, action);
  }
}

/// The node of the new rank 0 finds a port; publish() then tells all nodes.
void Coordinator::carry_out(const members::Form& form) {
  forming_ = form;
  send(elastic_.node_of(form.members.front()),
       message::Reserve{.generation = generation_, .members_generation = static_cast<int>(form.generation)});
}

void Coordinator::publish(const message::Reserved& reserved) {
  if (!forming_ || reserved.members_generation != static_cast<int>(forming_->generation)) return;
  const members::Form form = *std::exchange(forming_, std::nullopt);
  if (reserved.port == 0) {
    print(reserved.error);
    return end_elastic(1);
  }
  for (const auto& [node, info] : nodes_) {
    if (!info.has_workers()) continue;
    send(node, message::Members{.generation = generation_,
                                .members_generation = static_cast<int>(form.generation),
                                .members = form.members,
                                .host = reserved.host,
                                .port = reserved.port});
  }
  if (ends_with_) end_elastic(*ends_with_);
}

void Coordinator::carry_out(const members::Replace& replace) {
  send(elastic_.node_of(replace.worker), message::Replace{generation_, replace.worker, replace.joins_late});
}
void Coordinator::carry_out(const members::Ask& ask) {
  send(elastic_.node_of(ask.worker), message::Kill{generation_, ask.worker, SIGTERM});
}
void Coordinator::carry_out(const members::Kill& kill) {
  send(elastic_.node_of(kill.worker), message::Kill{generation_, kill.worker, SIGKILL});
}

void Coordinator::carry_out(const members::End& end) {
  if (forming_) {
    ends_with_ = end.code;
  } else {
    end_elastic(end.code);
  }
}

/// SIGTERM from the launcher makes workers save a checkpoint and end.
void Coordinator::end_elastic(int code) {
  follow(Next::restart_if_allowed, code);
  stop_all(SIGTERM, options_.interrupt_grace);
}

void Coordinator::carry_out(const members::Finish&) {
  for (const auto& [node, info] : nodes_) {
    if (info.state == NodeState::running) send(node, message::Finish{generation_});
  }
}

// --- nodes ---

/// A node joins while the others train.
void Coordinator::admit(Node node) {
  int node_rank = 0;
  for (const auto& [other, known] : nodes_) node_rank = std::max(node_rank, known.node_rank + 1);
  NodeInfo& info = nodes_.at(node);
  info.node_rank = node_rank;
  info.processes = std::min(info.processes, options_.elastic.max - elastic_.active());
  print(fmt::format("maniple: host {} joins with {} worker{}", info.host, info.processes,
                    info.processes == 1 ? "" : "s"));
  const int first = elastic_.add_node(node, info.processes, now_);
  move(node, NodeState::running);
  send(node, message::Start{.generation = generation_,
                            .restarts = restarts_,
                            .node_rank = info.node_rank,
                            .node_count = static_cast<int>(nodes_.size()),
                            .processes = info.processes,
                            .devices_per_process = info.devices_per_process,
                            .first_rank = first,
                            .world_size = elastic_.active(),
                            .core_total = info.processes,
                            .host = first_address_.host,
                            .port = first_address_.port,
                            .joins_late = elastic_.generation() > 0});
  carry_out(MemberActions{});  // its workers have a limit for init()
}

/// `info`: of the node, which is no longer in nodes_.
void Coordinator::lose_elastic(Node node, const NodeInfo& info, const std::string& text) {
  print(fmt::format("{}; the other nodes go on", text));
  if (info.has_workers()) carry_out(elastic_.on_node_gone(node, /*left=*/info.state == NodeState::leaving, now_));
  if (state_ == State::running) effects_.emplace_back(effect::StartAgents());
}

/// SIGTERM to a node's launcher: its workers finish their step and leave.
bool Coordinator::leave_elastic(Node node, int signal) {
  const NodeInfo& info = nodes_.at(node);
  if (elastic_.active() - elastic_.active_on(node) < options_.elastic.min) return false;
  print(fmt::format("maniple: host {} leaves the job ({} to its launcher)", info.host, signal_name(signal)));
  move(node, NodeState::leaving);
  send(node, message::Stop{.generation = generation_,
                           .signal = SIGTERM,
                           .grace_ms = static_cast<int>(options_.interrupt_grace.count() * 1000),
                           .leaves = true});
  return true;
}

// --- `maniple resize` ---

void Coordinator::on(const event::Resize& event) {
  const auto answer = [&](bool accepted, std::string text) {
    effects_.emplace_back(effect::Answer{accepted, std::move(text)});
  };
  if (!options_.elastic) return answer(false, "it was not started with --elastic, so its size cannot change");
  if (event.workers < options_.elastic.min || event.workers > options_.elastic.max) {
    return answer(false, fmt::format("{} workers; --elastic {}:{} allows {} to {}", event.workers, options_.elastic.min,
                                     options_.elastic.max, options_.elastic.min, options_.elastic.max));
  }
  if (state_ != State::running || !first_done_.empty())
    return answer(false, state_ == State::running ? "its training is over" : "it is not running now");
  const int before = elastic_.active();
  if (before == event.workers) return answer(true, fmt::format("it has {} workers already", before));
  answer(true, fmt::format("from {} to {} workers", before, event.workers));
  carry_out(elastic_.resize(event.workers, now_));
}

}  // namespace maniple::launch
