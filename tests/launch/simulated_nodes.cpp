// The nodes and ranks of a simulated job.
#include <algorithm>
#include <csignal>

#include <fmt/format.h>

#include "launch/simulated_job.h"

namespace maniple::launch {

void SimulatedJob::add_launcher(int host, int requested_rank, double delay) {
  const std::size_t which = launchers_.size();
  launchers_.push_back({.host = host, .requested_rank = requested_rank, .processes = 1 + dice_.below(3)});
  if (delay > 0) return at(delay, [this, which] { connect(which); });
  connect(which);
}

void SimulatedJob::connect(std::size_t which) {
  Launcher& launcher = launchers_[which];
  if (!launcher.alive || launcher.leaving) return;
  if (result_) {
    launcher.alive = false;
    return;
  }
  const Node earlier = launcher.node;
  const bool own = which == 0 && !options_.starts_agents;
  const Node node = own ? kOwnNode : next_node_++;
  launcher.node = node;
  launcher.connected = true;
  launcher.returning = false;
  launcher.last_to = launcher.last_from = now_;
  by_node_[node] = which;
  note(fmt::format("host {} connects as node {}", launcher.host, node));
  const event::Joined joined{node,
                             {.node_rank = launcher.requested_rank,
                              .processes = launcher.processes,
                              .host = fmt::format("host{}", launcher.host)}};
  if (by_node_.erase(earlier) != 0 && earlier != node) happened(event::Lost{earlier, "it has connected again"});
  by_node_[node] = which;
  happened(joined);
}

/// The connection of a node breaks, and maybe its launcher dies. Both sides notice later, and what is on the way is
/// gone.
void SimulatedJob::cut(std::size_t which, bool dies) {
  Launcher& launcher = launchers_[which];
  if (!launcher.connected) return;
  note(fmt::format("node {} is cut off{}", launcher.node, dies ? ", dead" : ""));
  launcher.connected = false;
  const Node node = launcher.node;
  at(dice_.between(0.05, 11), [this, node] {
    if (by_node_.erase(node) != 0) happened(event::Lost{node, "silence"});
  });
  const bool ranks_are_cut = dies || dice_.chance(50);
  if (ranks_are_cut && launcher.work == Work::working) {
    for (std::size_t i = 0; i < launcher.ranks.size(); ++i) {
      if (launcher.ranks[i].running)
        generations_[launcher.generation].roots.emplace(launcher.first_rank + static_cast<int>(i), now_);
    }
    const auto running =
        std::find_if(launcher.ranks.begin(), launcher.ranks.end(), [](const Rank& rank) { return rank.running; });
    if (dies) launcher.alive = false;
    if (running != launcher.ranks.end())
      spread(launcher.generation, launcher.first_rank + static_cast<int>(running - launcher.ranks.begin()));
  }
  if (dies) {
    launcher.alive = false;
    launcher.work = Work::idle;
  } else {
    at(dice_.between(0.05, 11), [this, which, node] {
      if (launchers_[which].node == node && !launchers_[which].connected) lose_master(which);
    });
  }
}

void SimulatedJob::lose_master(std::size_t which) {
  Launcher& launcher = launchers_[which];
  if (!launcher.alive || launcher.leaving || launcher.returning) return;
  if (options_.restarts.max_restarts == 0) return leave(which, 1);
  launcher.returning = true;
  if (launcher.work == Work::working || launcher.work == Work::ending) return stop(which, false);
  at(dice_.between(0.05, 3), [this, which] { connect(which); });
}

double SimulatedJob::transit(Node node) {
  if (node == kOwnNode) return 0;
  return quick_ || dice_.chance(70) ? dice_.between(0.0005, 0.02) : dice_.between(0, 2);
}

void SimulatedJob::to_node(Node node, const AgentMessage& message) {
  const auto found = by_node_.find(node);
  if (found == by_node_.end()) return;
  const std::size_t which = found->second;
  Launcher& launcher = launchers_[which];
  launcher.last_to = std::max(launcher.last_to, now_ + transit(node));
  at_time(launcher.last_to, [this, which, node, message] {
    if (launchers_[which].node == node && launchers_[which].connected && launchers_[which].alive)
      received(which, message);
  });
}

void SimulatedJob::from_node(std::size_t which, const AgentMessage& message) {
  Launcher& launcher = launchers_[which];
  if (!launcher.connected) return;
  const Node node = launcher.node;
  launcher.last_from = std::max(launcher.last_from, now_ + transit(node));
  at_time(launcher.last_from, [this, which, node, message] {
    if (launchers_[which].node == node && by_node_.count(node) != 0) happened(event::Received{node, message});
  });
}

void SimulatedJob::received(std::size_t which, const AgentMessage& message) {
  std::visit(overloaded{[&](const message::Reserve& asked) {
                          if (dice_.chance(1))
                            return from_node(which, message::Reserved{.generation = asked.generation, .error = "e"});
                          from_node(which, message::Reserved{.generation = asked.generation, .host = "h", .port = 99});
                        },
                        [&](const message::Start& asked) { start(which, asked); },
                        [&](const message::Stop& asked) { stop(which, asked.signal == SIGKILL); },
                        [&](const message::Quit& asked) { leave(which, asked.code); }, [](const auto&) {}},
             message);
}

void SimulatedJob::start(std::size_t which, const message::Start& start) {
  Launcher& launcher = launchers_[which];
  if (launcher.work == Work::working || launcher.work == Work::ending)
    broken("a node is started while its workers run");
  launcher.generation = start.generation;
  launcher.first_rank = start.first_rank;
  launcher.started_at = now_;
  const int started = ++launcher.started;
  Generation& generation = generations_[start.generation];
  if (dice_.chance(2)) {
    launcher.work = Work::idle;
    generation.roots.emplace(start.first_rank, now_);
    return from_node(which, message::Failed{start.generation, {.rank = start.first_rank, .pid = -1, .code = 2}});
  }
  launcher.work = Work::working;
  launcher.ranks.assign(static_cast<std::size_t>(start.processes), Rank());
  for (int local = 0; local < start.processes; ++local) {
    const int rank = start.first_rank + local;
    RankExit exit{.rank = rank, .pid = 100 + rank};
    const bool culprit = generation.plan != all_finish && rank == generation.culprit;
    if (culprit && generation.plan <= one_fails_and_others_finish) {
      (dice_.chance(50) ? exit.code : exit.signal) = 9;
      at(std::max(0.001, generation.culprit_at - now_), [=, this] { end_rank(which, started, local, exit); });
    } else if (culprit) {
      const double delay = std::max(0.001, generation.culprit_at - now_);
      at(delay, [=, this] { end_rank(which, started, local, exit); });
    } else if (generation.plan == all_finish || generation.plan == one_fails_and_others_finish) {
      at(dice_.between(1, 12), [=, this] { end_rank(which, started, local, exit); });
    }
  }
  if (generation.plan == one_is_absent) {
    for (int local = 0; local < start.processes; ++local) {
      if (start.first_rank + local == generation.culprit) continue;
      from_node(which, message::Waiting{start.generation, start.first_rank + local});
      break;
    }
    return;
  }
  // Ranks that start after another has failed lose it as well.
  if (!generation.roots.empty()) spread(start.generation, generation.roots.begin()->first);
}

/// A rank ends by itself.
void SimulatedJob::end_rank(std::size_t which, int started, int local, RankExit exit) {
  Launcher& launcher = launchers_[which];
  if (launcher.started != started || !launcher.alive || launcher.work != Work::working) return;
  Rank& rank = launcher.ranks[static_cast<std::size_t>(local)];
  if (!rank.running) return;
  rank.running = false;
  rank.ok = !exit.failed();
  exit.at_us = static_cast<std::int64_t>((now_ - launcher.started_at) * 1e6);
  Generation& generation = generations_[launcher.generation];
  generation.whole += rank.ok ? 1 : 0;
  note(fmt::format("rank {} ends: {}", exit.rank, describe_end(exit)));
  const bool culprit = generation.plan != all_finish && exit.rank == generation.culprit && !exit.consequence;
  if (culprit || (exit.failed() && !exit.consequence)) generation.roots.emplace(exit.rank, now_);
  from_node(which, rank.ok ? AgentMessage(message::Exited{launcher.generation, exit})
                           : AgentMessage(message::Failed{launcher.generation, exit}));
  if (culprit && generation.plan == one_is_absent) from_node(which, message::Absent{launcher.generation, exit});
  if (culprit && (generation.plan == one_fails || generation.plan == one_ends_early))
    spread(launcher.generation, exit.rank);
  if (!std::all_of(launcher.ranks.begin(), launcher.ranks.end(), [](const Rank& each) { return each.ok; })) return;
  at(dice_.between(0, 0.8), [=, this] {
    Launcher& done = launchers_[which];
    if (done.started != started || !done.alive || done.work != Work::working) return;
    done.work = Work::finished;
    from_node(which, message::Finished{done.generation});
  });
}

/// All ranks of the generation lose rank `root`, report that and end.
void SimulatedJob::spread(int generation, int root) {
  for (std::size_t which = 0; which < launchers_.size(); ++which) {
    const Launcher& launcher = launchers_[which];
    if (!launcher.alive || launcher.generation != generation || launcher.work != Work::working) continue;
    for (std::size_t local = 0; local < launcher.ranks.size(); ++local) {
      const int rank = launcher.first_rank + static_cast<int>(local);
      const RankExit exit{.rank = rank, .pid = 100 + rank, .code = 1, .consequence = true, .blamed = root};
      if (rank != root && launcher.ranks[local].running)
        at(dice_.between(0.001, 0.03), [this, which, started = launcher.started, local, exit] {
          end_rank(which, started, static_cast<int>(local), exit);
        });
    }
  }
}

void SimulatedJob::stop(std::size_t which, bool at_once) {
  Launcher& launcher = launchers_[which];
  if (launcher.work != Work::working && launcher.work != Work::ending) return ended(which);
  launcher.work = Work::ending;
  const double longest = dice_.chance(10) ? options_.interrupt_grace.count() : 0.8;
  at(at_once ? 0.001 : dice_.between(0.001, longest), [this, which, started = launcher.started] {
    if (launchers_[which].started == started && launchers_[which].work == Work::ending) ended(which);
  });
}

void SimulatedJob::ended(std::size_t which) {
  Launcher& launcher = launchers_[which];
  if (!launcher.alive) return;
  launcher.work = Work::idle;
  from_node(which, message::Stopped{launcher.generation});
  if (launcher.leaving) return leave(which, *launcher.leaving);
  if (launcher.returning) at(dice_.between(0.05, 3), [this, which] { connect(which); });
}

void SimulatedJob::leave(std::size_t which, int code) {
  Launcher& launcher = launchers_[which];
  launcher.leaving = code;
  if (launcher.work == Work::working || launcher.work == Work::ending) return stop(which, false);
  launcher.alive = false;
  if (!std::exchange(launcher.connected, false)) return;
  at(0.02, [this, node = launcher.node] {
    if (by_node_.erase(node) != 0) happened(event::Lost{node, "its launcher has ended"});
  });
}

}  // namespace maniple::launch
