#include "launch/simulated_job.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>

#include <fmt/format.h>

namespace maniple::launch {
namespace {

constexpr double kLimit = 5000;     // seconds of simulated time in which every job ends
constexpr double kStopLimit = 30;   // after Ctrl-C: the longest grace, a silent node, slow messages
constexpr double kTogether = 0.25;  // causes that begin within this time may be taken for each other

}  // namespace

std::uint64_t Dice::next() {  // splitmix64
  std::uint64_t z = state_ += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

namespace {

CoordinatorOptions choose_options(Dice& dice) {
  const int hosts = 1 + dice.below(4);
  CoordinatorOptions options{.nodes = {hosts, hosts},
                             .starts_agents = dice.chance(25),
                             .restarts = {.max_restarts = dice.below(4)},
                             .join_timeout = std::chrono::duration<double>(30),
                             .join_window = std::chrono::duration<double>(2),
                             .interrupt_grace = std::chrono::duration<double>(5)};
  if (!options.starts_agents && dice.chance(50)) options.nodes = {1 + dice.below(hosts), hosts + dice.below(2)};
  return options;
}

}  // namespace

SimulatedJob::SimulatedJob(std::uint64_t seed)
    : dice_(seed), options_(choose_options(dice_)), coordinator_(options_), quick_(dice_.chance(80)) {}

std::string SimulatedJob::run() {
  if (dice_.chance(40)) interrupt_at_ = 2 + dice_.below(60);
  happened(event::Begin());
  const bool ranked = options_.starts_agents || dice_.chance(50);
  for (int host = 0; host < options_.nodes.max; ++host) {
    const bool own = host == 0 && !options_.starts_agents;
    const double delay = own ? 0 : dice_.chance(5) ? dice_.between(20, 40) : dice_.between(0, 4);
    const int wrong = dice_.chance(2) ? 1 : 0;
    add_launcher(host, own ? 0 : ranked ? host + wrong : -1, delay);
  }
  for (int more = options_.nodes.elastic() ? dice_.below(3) : 0; more > 0; --more)
    add_launcher(10 + more, -1, dice_.between(0, 30));
  schedule_faults();
  while (broken_.empty()) {
    const auto timer = coordinator_.next_timer();
    if (!timer && queue_.empty()) break;
    if (timer && (queue_.empty() || timer->count() <= queue_.front().when)) {
      now_ = std::max(now_, timer->count());
      happened(event::Tick());
    } else {
      act();
    }
    if (now_ > kLimit) broken("the job does not end");
  }
  if (broken_.empty() && !result_)
    broken(fmt::format("the job waits for nothing, in state {}", static_cast<int>(coordinator_.state())));
  for (const Launcher& launcher : launchers_) {
    if (broken_.empty() && launcher.alive && launcher.connected)
      broken(fmt::format("the launcher of host {} was left behind", launcher.host));
  }
  return broken_;
}

void SimulatedJob::broken(const std::string& rule) {
  note("BROKEN: " + rule);
  if (broken_.empty()) broken_ = rule;
}

void SimulatedJob::note(const std::string& line) {
  if (recording_) log_.push_back(fmt::format("{:9.3f} {}", now_, line));
}

void SimulatedJob::at_time(double when, std::function<void()> action) {
  queue_.push_back({when, actions_++, std::move(action)});
  std::push_heap(queue_.begin(), queue_.end());
}

void SimulatedJob::act() {
  std::pop_heap(queue_.begin(), queue_.end());
  const Action next = std::move(queue_.back());
  queue_.pop_back();
  now_ = std::max(now_, next.when);
  next.action();
}

void SimulatedJob::schedule_faults() {
  for (int left = dice_.below(4); left > 0; --left) {
    at(dice_.between(0, 25), [this] {
      const auto which = static_cast<std::size_t>(dice_.below(static_cast<int>(launchers_.size())));
      const bool own = launchers_[which].node == kOwnNode;
      switch (dice_.below(8)) {
        case 0:
        case 1: return own ? void() : cut(which, false);
        case 2:
        case 3: return own ? void() : cut(which, true);
        case 4:
        case 5: return own ? void() : from_node(which, message::Interrupt{SIGTERM});
        case 6: return own ? void() : from_node(which, message::Interrupt{SIGINT});
        default:
          if (dice_.chance(80)) return happened(event::PassOn{kOwnNode, dice_.chance(50) ? SIGSTOP : SIGCONT, "h"});
          return happened(event::Broken{"maniple: the output is closed", 141});
      }
    });
  }
}

// --- the coordinator ---

void SimulatedJob::happened(const Event& event) {
  pending_.push_back(event);
  if (std::exchange(handling_, true)) return;
  for (std::size_t i = 0; i < pending_.size() && broken_.empty(); ++i) {
    if (++events_ == interrupt_at_) {
      pending_.insert(pending_.begin() + static_cast<std::ptrdiff_t>(i),
                      event::Interrupted{dice_.chance(50) ? SIGINT : SIGTERM, "h"});
      interrupt_at_ = dice_.chance(30) ? events_ + 1 + dice_.below(5) : -1;
    }
    const Event next = pending_[i];
    note(fmt::format("event {}", next.index()));
    Generation& generation = generations_[coordinator_.generation()];
    if (const auto* got = std::get_if<event::Received>(&next)) {
      const auto* finished = std::get_if<message::Finished>(&got->message);
      if (finished != nullptr && finished->generation == coordinator_.generation() &&
          coordinator_.state() == Coordinator::State::running)
        generation.finished.insert(got->node);
      if (std::holds_alternative<message::Interrupt>(got->message)) generation.reason = ends_ = true;
    }
    if (const auto* got = std::get_if<event::Received>(&next)) {
      const auto* failed = std::get_if<message::Failed>(&got->message);
      if (failed != nullptr) {
        const RankExit& exit = failed->exit;
        generations_[failed->generation].noticed.insert(exit.consequence ? exit.blamed : exit.rank);
      }
    }
    if (std::holds_alternative<event::Lost>(next)) generation.reason = true;
    if (std::holds_alternative<event::Broken>(next)) ends_ = true;
    const bool interrupts =
        std::holds_alternative<event::Interrupted>(next) && coordinator_.state() != Coordinator::State::done;
    const std::vector<Effect> effects = coordinator_.handle(next, Coordinator::Time(now_));
    if (interrupts && ++interrupts_ == 1) {
      interrupted_at_ = now_;
      if (!ends_) expected_code_ = 128 + std::get<event::Interrupted>(next).signal;
    }
    for (const Effect& effect : effects) carry_out(effect);
    if (const auto* got = std::get_if<event::Received>(&next)) {
      const auto* exited = std::get_if<message::Exited>(&got->message);
      if (exited != nullptr && exited->generation == coordinator_.generation())
        generations_[exited->generation].exit_known = true;
    }
    check_timers();
  }
  pending_.clear();
  handling_ = false;
}

/// No timer is set that the present state does not handle, and none is due after it was handled.
void SimulatedJob::check_timers() {
  using State = Coordinator::State;
  const auto timer = coordinator_.next_timer();
  switch (coordinator_.state()) {
    case State::reserving:
    case State::stopping:
    case State::done:
      if (timer) broken(fmt::format("a timer is set in state {}", static_cast<int>(coordinator_.state())));
      return;
    case State::restart_delay:
      if (!timer) broken("nothing ends the delay before a restart");
      return;
    case State::gathering:
      if (!timer && result_) broken("gathering after the end");
      return;
    case State::running: return;
  }
}

void SimulatedJob::carry_out(const Effect& effect) {
  if (const auto* print = std::get_if<effect::Print>(&effect)) {
    note("print " + print->text);
    return check_named(print->text);
  }
  if (const auto* done = std::get_if<effect::Done>(&effect)) {
    note(fmt::format("done {}", done->code));
    if (result_) broken("the job ends twice");
    result_ = done->code;
    if (interrupts_ > 0 && now_ - interrupted_at_ > kStopLimit) broken("the stop took too long");
    if (expected_code_ >= 0 && done->code != expected_code_) broken("the exit code is not the signal's");
    if (done->code != 0) return;
    const Generation& generation = generations_[coordinator_.generation()];
    if (generation.whole != generation.world_size || generation.world_size == 0)
      broken(
          fmt::format("exit code 0, but {} of {} ranks have exited with 0", generation.whole, generation.world_size));
    return;
  }
  if (std::holds_alternative<effect::StartAgents>(effect)) {
    note("start agents");
    if (!options_.starts_agents) return;
    for (int host = 0; host < options_.nodes.max; ++host) {
      const bool there = std::any_of(launchers_.begin(), launchers_.end(), [&](const Launcher& launcher) {
        return launcher.host == host && launcher.alive && !launcher.leaving;
      });
      if (!there) add_launcher(host, host, dice_.between(0.1, 5));
    }
    return;
  }
  const auto& send = std::get<effect::Send>(effect);
  note(fmt::format("send to node {}: message {}", send.node, send.message.index()));
  if (result_ && !std::holds_alternative<message::Quit>(send.message) &&
      !std::holds_alternative<message::Signal>(send.message))
    broken("a message after the end");
  const bool forms =
      std::holds_alternative<message::Reserve>(send.message) || std::holds_alternative<message::Start>(send.message);
  if (forms && interrupts_ > 0) broken("a group is formed after Ctrl-C");
  if (std::holds_alternative<message::Reserve>(send.message)) check_before_group();
  if (const auto* start = std::get_if<message::Start>(&send.message)) {
    Generation& generation = generations_[start->generation];
    if (start->generation != coordinator_.generation()) broken("a generation that is not the current one");
    if (++generation.starts[send.node] != 1) broken("a node is started twice in a generation");
    if (start->first_rank != generation.placed) broken("ranks overlap or are left out");
    if (generation.placed == 0) {
      generation.world_size = start->world_size;
      generation.plan = dice_.below(kPlans);
      generation.culprit = dice_.below(start->world_size);
      generation.culprit_at = now_ + dice_.between(0.05, 8);
    }
    generation.placed += start->processes;
    if (generation.world_size != start->world_size || generation.placed > start->world_size)
      broken("nodes do not agree on the world size");
  }
  if (const auto* stop = std::get_if<message::Stop>(&send.message)) {
    Generation& generation = generations_[stop->generation];
    if (stop->generation != coordinator_.generation()) broken("a stop of a generation that is not the current one");
    if (generation.starts[send.node] != 1) broken("a node is stopped that was not started");
    if (generation.stops.empty()) generation.stopped_knowing = generation.exit_known;
    if (stop->signal != SIGKILL && ++generation.stops[send.node] > 1) broken("a node is stopped twice");
  }
  to_node(send.node, send.message);
}

/// Before a new group is formed, every node of the last one that is still there has been stopped once and has ended.
void SimulatedJob::check_before_group() {
  const auto last = generations_.find(coordinator_.generation() - 1);
  if (last == generations_.end() || last->second.starts.empty()) return;
  Generation& generation = last->second;
  for (const auto& [node, starts] : generation.starts) {
    const auto launcher = by_node_.find(node);
    if (launcher == by_node_.end() || !launchers_[launcher->second].connected) continue;
    if (generation.finished.count(node) == 0 && generation.stops[node] != 1)
      broken(fmt::format("node {} was stopped {} times", node, generation.stops[node]));
    const Work work = launchers_[launcher->second].work;
    if (work == Work::working || work == Work::ending) broken("a group is formed while workers of the last one run");
  }
  if (generation.stopped_knowing && !generation.reason) broken("ranks that had finished run again for no reason");
}

/// The rank that the report names as the first is one whose end began on it, before any other.
void SimulatedJob::check_named(const std::string& text) {
  constexpr std::string_view kRank = "maniple: rank ";
  if (!text.starts_with(kRank)) return;
  Generation& generation = generations_[coordinator_.generation()];
  generation.reason = true;
  const int named = std::atoi(text.c_str() + kRank.size());
  double first = kLimit;
  for (const auto& [rank, when] : generation.roots) {
    if (generation.noticed.count(rank) != 0) first = std::min(first, when);
  }
  const auto root = generation.roots.find(named);
  if (quick_ && (root == generation.roots.end() || root->second > first + kTogether))
    broken(fmt::format("rank {} is named: {}", named, text));
}

}  // namespace maniple::launch
