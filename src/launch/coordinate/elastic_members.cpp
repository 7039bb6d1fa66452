#include "launch/coordinate/elastic_members.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace maniple::launch {

void ElasticMembers::begin() {
  workers_.clear();
  generation_ = 0;
  ranks_.clear();
  members_.clear();
  joined_.clear();
  met_.clear();
  broken_ = false;
  finishing_ = false;
  over_ = ended_ = false;
  waiting_until_.reset();
  errors_of_all_ = 0;
}

int ElasticMembers::add_node(int node, int workers, Time now) {
  // The numbers of a node that was lost, if they suffice: they appear in log files and prefixes.
  int first = 0, free = 0;
  for (; free < workers && first + free < static_cast<int>(workers_.size());) {
    if (at(first + free).node == kNoNode) {
      ++free;
    } else {
      first += free + 1;
      free = 0;
    }
  }
  if (free < workers) first = static_cast<int>(workers_.size()) - free;
  if (workers_.size() < static_cast<std::size_t>(first + workers))
    workers_.resize(static_cast<std::size_t>(first + workers));
  for (int number = first; number < first + workers; ++number) at(number) = {.node = node, .started = now};
  return first;
}

int ElasticMembers::active() const {
  return static_cast<int>(
      std::count_if(workers_.begin(), workers_.end(), [](const Worker& worker) { return worker.active(); }));
}

int ElasticMembers::active_on(int node) const {
  return static_cast<int>(std::count_if(workers_.begin(), workers_.end(),
                                        [&](const Worker& worker) { return worker.node == node && worker.active(); }));
}

MemberActions ElasticMembers::on_ready(int worker, Time now) {
  if (!knows(worker) || at(worker).state != State::starting) return {};
  at(worker).state = State::ready;
  check(now);
  return take();
}

MemberActions ElasticMembers::on_joined(int worker, Time now) {
  joined_.insert(worker);
  if (std::all_of(ranks_.begin(), ranks_.end(), [&](int member) { return joined_.count(member) != 0; }))
    met_ = {ranks_.begin(), ranks_.end()};
  check(now);
  return take();
}

MemberActions ElasticMembers::on_leaving(int worker, Time now) {
  if (!knows(worker) || at(worker).state != State::ready) return {};
  at(worker).leaving = true;
  at(worker).state = State::left;
  drop(worker);
  print(fmt::format("maniple: worker {} leaves the job", worker));
  check(now);
  return take();
}

MemberActions ElasticMembers::on_exit(const RankExit& exit, Time now) {
  if (!knows(exit.rank)) return {};
  Worker& worker = at(exit.rank);
  worker.runs = false;
  const bool was_last = is_member(exit.rank) && members_.size() == 1;
  if (exit.failed() || worker.leaving || (is_member(exit.rank) && joined_.count(exit.rank) == 0)) drop(exit.rank);
  if (worker.leaving) {
    worker.state = State::left;
  } else if (!exit.failed()) {
    worker.state = State::done;
    finishing_ = true;
    end_late_workers();
  } else {
    worker.state = State::lost;
    code_ = exit.exit_code();
    const bool quick = now - worker.started < kStable;
    worker.quick_failures = quick ? worker.quick_failures + 1 : 0;
    std::string text = describe_failure(exit, static_cast<int>(workers_.size()));
    if (was_last && exit.signal == 0 && !exit.consequence) ++errors_of_all_;
    if (errors_of_all_ >= kMaxErrorsOfAll) {
      text += fmt::format("\nmaniple: all workers have ended with errors {} times; the job ends", errors_of_all_);
    } else if (finishing_) {
      text += "\nmaniple: it is not replaced: the training is over";
    } else if (worker.quick_failures >= kMaxQuickFailures) {
      text += fmt::format("\nmaniple: worker {} has failed {} times in a row; it is not replaced", exit.rank,
                          worker.quick_failures);
    } else {
      const Time delay = worker.quick_failures > 1 ? policy_.delay_before(worker.quick_failures - 1) : Time(0);
      worker.replace_at = now + delay;
      text += delay.count() > 0 ? fmt::format("\nmaniple: worker {} is replaced in {:.0f} s", exit.rank, delay.count())
                                : fmt::format("\nmaniple: worker {} is replaced", exit.rank);
    }
    print(std::move(text));
    if (errors_of_all_ >= kMaxErrorsOfAll && !ended_) end();
  }
  finish_if_over();
  return on_time(now);
}

MemberActions ElasticMembers::on_node_gone(int node, bool left, Time now) {
  for (int number = 0; number < static_cast<int>(workers_.size()); ++number) {
    Worker& worker = at(number);
    if (worker.node != node) continue;
    drop(number);
    const bool done = worker.state == State::done;
    const bool good = left || worker.state == State::left;
    worker = {.node = kNoNode, .state = done ? State::done : good ? State::left : State::lost, .runs = false};
  }
  finish_if_over();
  return on_time(now);
}

void ElasticMembers::finish_if_over() {
  const bool ends = std::all_of(workers_.begin(), workers_.end(),
                                [](const Worker& worker) { return !worker.runs && !worker.replace_at; });
  const auto any_is = [&](State state) {
    return std::any_of(workers_.begin(), workers_.end(), [&](const Worker& worker) { return worker.state == state; });
  };
  const bool well = any_is(State::done) || (any_is(State::left) && !any_is(State::lost));
  if (!ends || !well || std::exchange(over_, true)) return;
  finishing_ = true;
  actions_.emplace_back(members::Finish{});
}

// --- other sizes ---

MemberActions ElasticMembers::resize(int count, Time now) {
  print(fmt::format("maniple: the job is resized from {} to {} workers", active(), count));
  shrink_to(count);
  grow_to(count, now);
  check(now);
  return take();
}

/// Workers that are not members leave first, then the last ranks.
void ElasticMembers::shrink_to(int count) {
  std::vector<int> order;
  for (int number = static_cast<int>(workers_.size()) - 1; number >= 0; --number) {
    if (!is_member(number)) order.push_back(number);
  }
  order.insert(order.end(), members_.rbegin(), members_.rend());
  for (const int number : order) {
    Worker& worker = at(number);
    if (active() <= count) return;
    if (!worker.active()) continue;
    worker.leaving = true;
    worker.replace_at.reset();
    if (is_member(number)) {
      actions_.emplace_back(members::Ask{number});
      continue;
    }
    worker.state = State::left;
    if (worker.runs) actions_.emplace_back(members::Kill{number});
  }
}

void ElasticMembers::grow_to(int count, Time now) {
  for (int number = 0; number < static_cast<int>(workers_.size()) && active() < count; ++number) {
    const Worker& worker = at(number);
    if (!worker.active() && !worker.runs && worker.node != kNoNode) start(number, now);
  }
  while (active() < count) {
    std::set<int> nodes;
    for (const Worker& worker : workers_) nodes.insert(worker.node);
    nodes.erase(kNoNode);
    if (nodes.empty()) return;
    const int node =
        *std::min_element(nodes.begin(), nodes.end(), [&](int a, int b) { return active_on(a) < active_on(b); });
    workers_.push_back({.node = node});
    start(static_cast<int>(workers_.size()) - 1, now);
  }
}

void ElasticMembers::start(int number, Time now) {
  Worker& worker = at(number);
  worker = {.node = worker.node, .quick_failures = worker.quick_failures, .started = now};
  actions_.emplace_back(members::Replace{number, generation_ > 0});
}

// --- generations ---

/// The generation cannot go on with this worker.
void ElasticMembers::drop(int worker) {
  if (!is_member(worker)) return;
  members_.erase(std::find(members_.begin(), members_.end(), worker));
  met_.erase(worker);
  broken_ = true;
}

void ElasticMembers::end_late_workers() {
  for (int number = 0; number < static_cast<int>(workers_.size()); ++number) {
    Worker& worker = at(number);
    worker.replace_at.reset();
    if (met_.count(number) != 0 || (worker.state != State::starting && worker.state != State::ready)) continue;
    worker.leaving = true;
    worker.state = State::left;
    actions_.emplace_back(members::Kill{number});
  }
}

MemberActions ElasticMembers::on_lost(int worker, std::uint32_t generation, const std::vector<int>& ranks, Time now) {
  if (!knows(worker) || generation != generation_) return {};
  for (const int rank : ranks) {
    if (rank < 0 || rank >= static_cast<int>(ranks_.size())) continue;
    const int suspect = ranks_[static_cast<std::size_t>(rank)];
    if (suspect != worker && is_member(suspect) && lives(suspect)) actions_.emplace_back(members::Kill{suspect});
  }
  check(now);
  return take();
}

MemberActions ElasticMembers::on_time(Time now) {
  for (int number = 0; number < static_cast<int>(workers_.size()); ++number) {
    Worker& worker = at(number);
    if (starts_late(worker) && worker.started + join_timeout_ <= now) {
      print(fmt::format("maniple: worker {} has not called init() for {:.0f} s, and is ended (--join-timeout)", number,
                        join_timeout_.count()));
      worker.started = now;  // its end counts as quick: the job gives up a worker that never calls it
      actions_.emplace_back(members::Kill{number});
    }
    if (worker.replace_at && *worker.replace_at <= now) start(number, now);
  }
  check(now);
  if (waiting_until_ && *waiting_until_ <= now) {
    print(
        fmt::format("maniple: timed out after {:.0f} s: fewer than {} workers are ready; the job ends "
                    "(--join-timeout)",
                    join_timeout_.count(), range_.min));
    waiting_until_.reset();
    end();
  }
  return take();
}

std::optional<ElasticMembers::Time> ElasticMembers::next_timer() const {
  std::optional<Time> next = waiting_until_;
  for (const Worker& worker : workers_) {
    if (worker.replace_at) next = next ? std::min(*next, *worker.replace_at) : worker.replace_at;
    if (starts_late(worker)) {
      const Time limit = worker.started + join_timeout_;
      next = next ? std::min(*next, limit) : limit;
    }
  }
  return next;
}

void ElasticMembers::check(Time now) {
  std::vector<int> wanted;
  std::copy_if(members_.begin(), members_.end(), std::back_inserter(wanted), [&](int worker) { return lives(worker); });
  const std::size_t old = wanted.size();
  bool expects = false;  // more workers may become ready
  for (int number = 0; number < static_cast<int>(workers_.size()); ++number) {
    const Worker& worker = at(number);
    expects = expects || worker.state == State::starting || worker.replace_at;
    if (worker.state == State::ready && !is_member(number)) wanted.push_back(number);
  }
  if (generation_ == 0) {
    if (expects) return;  // the first generation has all workers
  } else if (!broken_) {
    const bool met = std::all_of(members_.begin(), members_.end(), [&](int worker) {
      return joined_.count(worker) != 0 || at(worker).state == State::done;
    });
    if (!met || wanted.size() == old) return;
  }
  if (over_ || ended_) return;
  const int least = finishing_ ? 1 : range_.min;
  if (static_cast<int>(wanted.size()) < least) {
    const auto ends = [](const Worker& worker) { return worker.state == State::left && worker.runs; };
    if (wanted.empty() && std::any_of(workers_.begin(), workers_.end(), ends)) return;  // perhaps all leave
    const bool may_come = expects || (nodes_may_join_ && !finishing_);
    if (!may_come) {
      if (!finishing_) end();
    } else if (!waiting_until_) {
      waiting_until_ = now + join_timeout_;
      print(fmt::format("maniple: {} of at least {} workers are ready; waiting for replacements{}", wanted.size(),
                        least, nodes_may_join_ ? " and nodes" : ""));
    }
    return;
  }
  waiting_until_.reset();
  if (!wanted.empty()) form(std::move(wanted));
}

void ElasticMembers::form(std::vector<int> members) {
  members_ = ranks_ = std::move(members);
  joined_.clear();
  broken_ = false;
  actions_.emplace_back(members::Form{++generation_, ranks_});
}

/// Ends the job, which has too few workers. Those that live and have the state meet once more, to save it.
void ElasticMembers::end() {
  ended_ = true;
  for (Worker& worker : workers_) worker.replace_at.reset();
  std::vector<int> survivors;
  std::copy_if(members_.begin(), members_.end(), std::back_inserter(survivors),
               [&](int worker) { return lives(worker); });
  if (!survivors.empty()) form(std::move(survivors));
  actions_.emplace_back(members::End{code_});
}

}  // namespace maniple::launch
