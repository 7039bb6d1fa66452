#include "launch/coordinate/elastic_members.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace maniple::launch {

void ElasticMembers::begin(int workers, Time now) {
  workers_.assign(static_cast<std::size_t>(workers), {.started = now});
  generation_ = 0;
  ranks_.clear();
  members_.clear();
  joined_.clear();
  met_.clear();
  broken_ = false;
  finishing_ = false;
  waiting_until_.reset();
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
  if (exit.failed() || (is_member(exit.rank) && joined_.count(exit.rank) == 0)) drop(exit.rank);
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
    if (finishing_) {
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
  }
  return on_time(now);
}

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
    if (!worker.replace_at || *worker.replace_at > now) continue;
    worker.replace_at.reset();
    worker.state = State::starting;
    worker.started = now;
    actions_.emplace_back(members::Replace{number, generation_ > 0});
  }
  check(now);
  if (waiting_until_ && *waiting_until_ <= now) {
    print(
        fmt::format("maniple: timed out after {:.0f} s: fewer than {} workers are ready; the last checkpoint is the "
                    "state of the job (--join-timeout)",
                    join_timeout_.count(), range_.min));
    actions_.emplace_back(members::End{code_});
    waiting_until_.reset();
  }
  return take();
}

std::optional<ElasticMembers::Time> ElasticMembers::next_timer() const {
  std::optional<Time> next = waiting_until_;
  for (const Worker& worker : workers_) {
    if (worker.replace_at) next = next ? std::min(*next, *worker.replace_at) : worker.replace_at;
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
  const int least = finishing_ ? 1 : range_.min;
  if (static_cast<int>(wanted.size()) < least) {
    if (!expects) {
      if (!finishing_) actions_.emplace_back(members::End{code_});
    } else if (!waiting_until_) {
      waiting_until_ = now + join_timeout_;
      print(
          fmt::format("maniple: {} of at least {} workers are ready; waiting for replacements", wanted.size(), least));
    }
    return;
  }
  waiting_until_.reset();
  if (wanted.empty()) return;
  members_ = ranks_ = std::move(wanted);
  joined_.clear();
  broken_ = false;
  actions_.emplace_back(members::Form{++generation_, ranks_});
}

}  // namespace maniple::launch
