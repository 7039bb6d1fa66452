#include "comm/session/call_watch.h"

#include <algorithm>
#include <utility>

#include "comm/base/fork_guard.h"
#include "comm/base/mutex.h"
#include "comm/call/signature.h"
#include "comm/session/mismatch_report.h"

namespace maniple {
namespace {

constexpr std::chrono::milliseconds kWatchPeriod{100};
constexpr double kCompareAfter = 0.25;  // seconds in a call; longer than nearly all calls take
constexpr double kMostBetween = 4;

// Worlds whose ranks are all threads of this process.
struct WatchTable {
  struct Compared {
    std::uint64_t seq = 0;
    Deadline::Clock::time_point when{};
  };
  struct World {
    std::map<int, std::weak_ptr<CallWatch>> watches;  // by rank
    std::map<std::string, Compared> compared;         // by group
  };
  Mutex mutex;
  std::map<std::uint64_t, World> worlds MANIPLE_GUARDED_BY(mutex);
};
constinit ProcessWide<WatchTable> process_watches;

}  // namespace

std::shared_ptr<CallWatch> CallWatch::start(Callbacks callbacks) {
  std::shared_ptr<CallWatch> watch(new CallWatch(std::move(callbacks)));
  if (!watch->callbacks_.compare) {
    WatchTable& table = *process_watches;
    const MutexLock lock(table.mutex);
    table.worlds[watch->callbacks_.world].watches[watch->callbacks_.rank] = watch;
  }
  watch->callbacks_.loop->post([watch] { watch->check(); });
  return watch;
}

void CallWatch::stop() {
  stopped_ = true;
  if (callbacks_.compare) return;
  WatchTable& table = *process_watches;
  const MutexLock lock(table.mutex);
  const auto it = table.worlds.find(callbacks_.world);
  if (it == table.worlds.end()) return;
  it->second.watches.erase(callbacks_.rank);
  if (it->second.watches.empty()) table.worlds.erase(it);
}

void CallWatch::check() {
  if (stopped_) return;
  callbacks_.loop->call_at(Deadline::after(kWatchPeriod), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->check();
  });
  auto asked = std::exchange(asked_, {});
  for (const WaitReports::Group& group : callbacks_.groups()) {
    // Calls on a device run from the time when they are enqueued. StreamWatcher knows when a stream waits in one.
    if (!group.compares_arguments) continue;
    const CallProgress call = group.progress();
    if (!call.running || group.members.size() < 2) continue;
    Asked& about = asked_[group.name] = asked[group.name];
    if (about.seq != call.seq) about = {.seq = call.seq, .next_s = kCompareAfter};
    if (call.seconds < about.next_s) continue;
    about.next_s = call.seconds + std::min(call.seconds, kMostBetween);
    if (callbacks_.compare) {
      callbacks_.compare(group.name, call.seq);
    } else {
      compare_here(group, call.seq);
    }
  }
}

void CallWatch::compare_here(const WaitReports::Group& group, std::uint64_t seq) {
  std::vector<std::shared_ptr<CallWatch>> members;
  {
    WatchTable& table = *process_watches;
    const MutexLock lock(table.mutex);
    const auto world = table.worlds.find(callbacks_.world);
    if (world == table.worlds.end()) return;
    // All members check, at about the same time. This rank's call is older than kCompareAfter, so a comparison that
    // another member made since then has included it.
    WatchTable::Compared& last = world->second.compared[group.name];
    const auto now = Deadline::Clock::now();
    if (last.seq == seq && now - last.when < std::chrono::duration<double>(kCompareAfter)) return;
    last = {.seq = seq, .when = now};
    const auto& watches = world->second.watches;
    for (const int member : group.members) {
      const auto found = watches.find(member);
      if (auto watch = found == watches.end() ? nullptr : found->second.lock()) members.push_back(watch);
    }
  }
  std::vector<RankCall> calls;
  for (const auto& member : members) {
    RankCall call = member->callbacks_.called(group.name, seq);
    if (!call.call.empty()) calls.push_back(std::move(call));
  }
  if (!calls_differ(calls, group.compares_arguments)) return;
  detector::Abort abort{
      .rank = callbacks_.rank, .seq = seq, .group = group.name, .error = mismatch_of(std::move(calls))};
  abort.error.origin = callbacks_.rank;
  for (const auto& member : members) member->callbacks_.aborted(abort);
}

}  // namespace maniple
