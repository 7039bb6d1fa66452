// Random worlds of failure detectors: ranks join late, die, stop, starve, leave and fail at random times, connections
// break and networks are cut, while leaders change. What must hold at every moment is checked by SimulatedWorld, what
// must hold in the end here.
//
// A failure prints its seed. DETECTOR_SEED=<seed> runs that schedule alone and prints what happens in it.
#include <algorithm>
#include <cstdlib>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "comm/session/simulated_world.h"
#include "harness/sanitizers.h"

namespace maniple::harness {
namespace {

namespace simulation {

/// The same numbers on every platform.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ULL + 0x2545f4914f6cdd1dULL) {}
  double number(double least, double most) {
    state_ += 0x9e3779b97f4a7c15ULL;
    std::uint64_t bits = state_;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ULL;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebULL;
    bits ^= bits >> 31;
    return least + (most - least) * (static_cast<double>(bits >> 11) * 0x1p-53);
  }
  int below(int limit) { return static_cast<int>(number(0, limit)); }
  bool chance(double probability) { return number(0, 1) < probability; }

 private:
  std::uint64_t state_;
};

class Schedule {
 public:
  Schedule(std::uint64_t seed, bool log) : random_(seed), world_(options(seed, log)), touched_(n(), false) {
    if (random_.chance(0.3)) leaves_on_failure_ = random_.number(0, 0.5);
  }

  /// What went wrong; empty: nothing.
  std::string run() {
    begin();
    const int faults = random_.below(std::min(n(), 8) + 1);
    for (int i = 0; i < faults; ++i) add_fault();
    if (random_.chance(0.5)) add_abort();
    if (random_.chance(0.2)) add_abort();
    if (random_.chance(0.4)) add_shrink();
    if (leaves_on_failure_ > 0) {
      world_.on_failure([this](int rank) {
        if (!random_.chance(0.3)) return;
        strike(rank);
        left_.insert(rank);
        world_.at(world_.now() + random_.number(0, leaves_on_failure_), [this, rank] { leave(rank); });
      });
    }
    if (!strict_) world_.run(last_ + 1.5 * heartbeat_s_);  // a cut is noticed late
    const bool quiet = world_.run_until_quiet(last_ + 60 + 4 * n());
    if (!world_.broken().empty()) return world_.broken();
    if (!quiet) return fmt::format("not quiet after {:.1f} s: {}", world_.now(), world_.why_not_quiet());
    check_end();
    return world_.broken();
  }

 private:
  int n() const { return static_cast<int>(hosts_.size()); }

  SimulatedWorld::Options options(std::uint64_t seed, bool log) {
    const int n = random_.chance(0.0005) ? 70 : 2 + random_.below(7);
    const int hosts = 1 + random_.below(3);
    for (int r = 0; r < n; ++r) hosts_.push_back(random_.below(hosts));
    SimulatedWorld::Options options{.hosts = hosts_, .seed = seed, .log = log};
    heartbeat_s_ = options.heartbeat_s = random_.chance(0.05) ? 0 : 2.5;
    const double slow[] = {1e-3, 1e-3, 2e-2, 0.1, 0.4};
    options.most_delay = slow[random_.below(5)];
    options.connected = all_joined_ = random_.chance(0.7);
    only_deaths_ = random_.chance(0.5);
    return options;
  }

  void begin() {
    if (all_joined_) return;
    const double last = random_.number(0, random_.chance(0.2) ? 8 : 1);
    for (int r = 1; r < n(); ++r) world_.at(random_.number(0, last), [this, r] { world_.join(r); });
    world_.expect_all(20 + 0.1 * n());
    joined_at_ = last_ = last + 0.5;
  }

  // Many faults come close to one another: that is when leaders change.
  double some_time(double least) {
    double when = random_.number(least, least + 3);
    if (last_ > least && random_.chance(0.6)) when = last_ + random_.number(0, random_.chance(0.5) ? 0.01 : 0.3);
    last_ = std::max(last_, when);
    return when;
  }

  int victim() { return random_.chance(0.4) ? random_.below(std::min(n(), 3)) : random_.below(n()); }
  void strike(int rank) { touched_[static_cast<std::size_t>(rank)] = true; }

  void add_fault() {
    const int rank = victim();
    const int kind = random_.below(only_deaths_ ? 5 : 10);
    switch (kind) {
      case 0: strike(rank); return world_.at(some_time(0), [this, rank] { world_.kill(rank); });
      case 1: {  // the leader may die while it tells the others of a loss
        strike(rank);
        const int sends = random_.below(n());
        return world_.at(some_time(0), [this, rank, sends] {
          random_.chance(0.5) ? world_.kill(rank) : world_.kill_while_sending(rank, sends);
        });
      }
      case 2:
      case 3:
        strike(rank);
        left_.insert(rank);
        return world_.at(some_time(joined_at_), [this, rank] { leave(rank); });
      case 4: {
        if (heartbeat_s_ == 0) return;
        strike(rank);
        // A host vanishes with all its ranks, a process is stopped alone.
        const double when = some_time(joined_at_);
        const int host = hosts_[static_cast<std::size_t>(rank)];
        const bool alone = std::count(hosts_.begin(), hosts_.end(), host) == 1;
        return world_.at(when, [this, rank, alone] { alone ? world_.vanish(rank) : world_.hold(rank, kForever, 'T'); });
      }
      case 5: return add_hold(rank, 'T');
      case 6: return add_hold(rank, 'R');
      case 7:
      case 8: {
        if (heartbeat_s_ == 0) return;
        const int other = random_.below(n());
        if (hosts_[static_cast<std::size_t>(other)] == hosts_[static_cast<std::size_t>(rank)]) return;
        strict_ = false;
        const double until = random_.chance(0.5) ? kForever : last_ + random_.number(0, 8);
        const bool both = random_.chance(0.5);
        return world_.at(some_time(joined_at_), [this, rank, other, until, both] {
          world_.cut(rank, other, until);
          if (both) world_.cut(other, rank, until);
        });
      }
      default: {
        if (heartbeat_s_ == 0) return;
        const int other = random_.below(n());
        strict_ = false;
        return world_.at(some_time(joined_at_), [this, rank, other] { world_.break_connection(rank, other); });
      }
    }
  }

  // No rank leaves before all have joined: init() would not have returned.
  void leave(int rank) {
    for (int r = 0; r < n(); ++r) {
      if (world_.process(r).state == SimulatedWorld::State::joining) return;
    }
    world_.leave(rank);
  }

  void add_hold(int rank, char state) {
    const bool is_short = random_.chance(0.5);
    const double length = is_short ? random_.number(0, 1.5) : random_.number(1.5, 12);
    if (!is_short) strict_ = false;
    const double when = some_time(joined_at_);
    last_ = std::max(last_, when + (is_short ? 0 : length));
    world_.at(when, [this, rank, when, length, state] { world_.hold(rank, when + length, state); });
  }

  void add_abort() {
    const int rank = victim();
    const double when = some_time(joined_at_);
    const std::string group = random_.chance(0.5) ? "g0" : "g1";
    ErrorInfo error{.size = n(), .origin = rank, .reason = fmt::format("rank {} gives up", rank)};
    std::uint64_t seq = 0;
    const int kind = random_.below(4);
    if (kind == 1) {  // a connection to another rank has closed, which may leave or die
      error.kind = ErrorKind::peer_lost;
      error.loss = LossKind::left_or_ended;
      error.ranks = {random_.below(n())};
    } else if (kind >= 2) {  // ranks that call different operations; some have not called yet
      error.kind = kind == 2 ? ErrorKind::mismatch : ErrorKind::timeout;
      seq = 7;
      for (int r = 0; r < n(); ++r) {
        const std::string call = random_.chance(0.3) ? "broadcast #7" : "all_reduce #7";
        const double called = when + random_.number(-0.2, 0.3);
        if (random_.chance(0.8))
          world_.at(std::max(0.0, called), [this, r, call] { world_.process(r).calls[7] = call; });
      }
      if (random_.chance(0.3))
        world_.at(when,
                  [this, rank] { world_.announce(rank, detector::Compare{.rank = rank, .seq = 7, .group = "g0"}); });
    }
    world_.at(when, [this, rank, group, error, seq] {
      world_.abort(rank, group, error, seq);
      if (world_.runs(rank)) aborts_.emplace_back(rank, group);
    });
  }

  // All ranks shrink a group, while others die.
  void add_shrink() {
    if (!all_joined_) return;
    const double when = some_time(joined_at_);
    for (int r = 0; r < n(); ++r) shrink(r, when + random_.number(0, random_.chance(0.5) ? 0.01 : 0.5));
  }
  void shrink(int rank, double when) {
    world_.at(when, [this, rank] {
      const double until = world_.process(rank).held_until;
      if (until <= world_.now()) return world_.shrink(rank);
      if (until < kForever) shrink(rank, until + 0.001);
    });
  }

  // ---- The end

  bool is_present(int rank) const {
    const auto& it = world_.process(rank);
    return world_.runs(rank) && it.held_until < kForever && !it.core->is_excluded();
  }
  bool knows_lost(int rank, int other) const {
    const auto& departures = world_.process(rank).core->departures();
    const auto it = departures.find(other);
    return it != departures.end() && std::holds_alternative<detector::Lost>(it->second);
  }
  void require(bool holds, const std::string& what) {
    if (!holds) world_.fail(what);
  }

  void check_end() {
    bool same_leader = true;  // rank 0 leads from the beginning to the end
    for (int r = 0; r < n(); ++r) {
      if (strict_ && !touched_[static_cast<std::size_t>(r)])
        require(!world_.runs(r) || is_present(r), fmt::format("rank {} had no fault but is excluded", r));
      if (is_present(r) && world_.process(r).core->leader() != 0) same_leader = false;
    }
    for (int r = 0; r < n(); ++r) {
      if (is_present(r)) check_rank(r, same_leader);
    }
    for (const auto& [rank, group] : aborts_) {
      if (is_present(rank)) check_abort(rank, group, same_leader);
    }
  }

  // All survivors have the same group, which holds every one of them.
  void check_survivors(int r) {
    const auto& it = world_.process(r);
    if (!it.survived) return;
    for (int other = 0; other < n(); ++other) {
      if (!is_present(other) || world_.process(other).core->leader() != it.core->leader()) continue;
      const auto& theirs = world_.process(other).survived;
      require(theirs && theirs->seq == it.survived->seq && theirs->members == it.survived->members,
              fmt::format("ranks {} and {} have different survivors", r, other));
      const auto& members = it.survived->members;
      require(std::count(members.begin(), members.end(), other) == 1,
              fmt::format("rank {} is not among the survivors of rank {}", other, r));
    }
  }

  void check_rank(int r, bool same_leader) {
    check_survivors(r);
    const auto& it = world_.process(r);
    const int leader = it.core->leader();
    for (int other = 0; other < n(); ++other) {
      const bool lost = knows_lost(r, other);
      const auto reports = it.lost.find(other);
      require((reports == it.lost.end() ? 0 : reports->second.size()) == (lost ? 1u : 0u),
              fmt::format("rank {} did not hear once that rank {} is lost", r, other));
      require(it.gone.count(other) == 0 || it.gone.at(other) == 1, "a rank heard twice that another is gone");
      require(lost == knows_lost(leader, other) || (!strict_ && left_.count(other) != 0),
              fmt::format("rank {} and its leader {} disagree whether rank {} is lost", r, leader, other));
      if (!strict_) continue;
      require(!is_present(other) || it.core->departures().count(other) == 0,
              fmt::format("rank {} takes rank {} for gone, which is present", r, other));
      require(!is_present(other) || world_.process(other).core->leader() == leader, "two ranks lead");
      const auto state = world_.process(other).state;
      if (state == SimulatedWorld::State::left)
        require(!lost, fmt::format("rank {} takes rank {} for lost, which left in good order", r, other));
      if (world_.process(other).vanished || (world_.runs(other) && world_.process(other).held_until >= kForever))
        require(lost || left_.count(other) != 0, fmt::format("rank {} does not know that rank {} is lost", r, other));
      if (same_leader && state == SimulatedWorld::State::dead && all_joined_)
        require(lost, fmt::format("rank {} does not know that rank {} was lost", r, other));
      if (same_leader && lost)
        require(reports->second == world_.process(0).lost.at(other),
                fmt::format("ranks 0 and {} have different causes for rank {}", r, other));
    }
  }

  // Every present rank with the same leader hears of the abort once, with the same cause.
  void check_abort(int rank, const std::string& group, bool same_leader) {
    const int leader = world_.process(rank).core->leader();
    for (int r = 0; r < n(); ++r) {
      if (!is_present(r) || world_.process(r).core->leader() != leader) continue;
      const auto it = world_.process(r).aborted.find(group);
      if (it == world_.process(r).aborted.end())
        return require(false, fmt::format("rank {} does not know that {} failed on rank {}", r, group, rank));
      require(it->second.size() == 1, fmt::format("rank {} hears twice that {} failed", r, group));
      const auto& first = world_.process(leader).aborted.find(group);
      if (same_leader && strict_ && first != world_.process(leader).aborted.end())
        require(it->second.front().reason == first->second.front().reason,
                fmt::format("ranks {} and {} have different causes for {}", r, leader, group));
    }
  }

  Random random_;
  std::vector<int> hosts_;
  double heartbeat_s_ = 0;
  bool all_joined_ = true;
  bool only_deaths_ = false;
  bool strict_ = true;  // no rank without a fault of its own may be excluded
  double leaves_on_failure_ = 0;
  SimulatedWorld world_;
  std::vector<bool> touched_;
  std::set<int> left_;
  double joined_at_ = 0;
  double last_ = 0;
  std::vector<std::pair<int, std::string>> aborts_;
};

void run_seeds(std::uint64_t first, std::uint64_t count) {
  int failures = 0;
  for (std::uint64_t seed = first; seed < first + count && failures < 5; ++seed) {
    const std::string broken = Schedule(seed, false).run();
    if (broken.empty()) continue;
    ++failures;
    ADD_FAILURE() << "DETECTOR_SEED=" << seed << ": " << broken;
  }
}

TEST(DetectorSimulation, RandomSchedules) {
  constexpr auto kSchedules = static_cast<std::uint64_t>(100'000 / (kSlowdown * kSlowdown));
  if (const char* seed = std::getenv("DETECTOR_SEED"); seed != nullptr) {
    EXPECT_EQ(Schedule(std::strtoull(seed, nullptr, 10), true).run(), "");
    return;
  }
  run_seeds(1, kSchedules);
}

// ---- What random schedules have found

void expect_quiet(SimulatedWorld& world) {
  EXPECT_TRUE(world.run_until_quiet(60)) << world.broken() << world.why_not_quiet();
}

// The leader passed a loss on to some ranks and died: the next leader only saw that nobody listens at the address.
TEST(DetectorSimulation, ALossThatADyingLeaderToldOneRankReachesAll) {
  SimulatedWorld world({.hosts = {0, 1, 2, 3}});
  world.cut(0, 1, kForever);
  world.at(1, [&] { world.kill(3); });
  world.at(1.1, [&] { world.kill(0); });
  expect_quiet(world);
  for (const int rank : {1, 2}) {
    ASSERT_EQ(world.process(rank).lost.count(3), 1u) << rank;
    EXPECT_EQ(world.process(rank).lost.at(3).front(), "rank 3 is lost: its process ended without leaving the group");
  }
}

// The group failed before a rank had connected to the new leader.
TEST(DetectorSimulation, ARankThatConnectsLateHearsOfEarlierAborts) {
  SimulatedWorld world({.hosts = {0, 0, 0, 0}});
  world.at(1, [&] { world.hold(3, 1.5, 'R'); });
  world.at(1.1, [&] { world.leave(0); });
  world.at(1.3, [&] { world.abort(2, "g", {.reason = "rank 2 gives up"}, 0); });
  expect_quiet(world);
  for (const int rank : {1, 2, 3}) {
    ASSERT_EQ(world.process(rank).aborted.count("g"), 1u) << rank;
    EXPECT_EQ(world.process(rank).aborted.at("g").size(), 1u) << rank;
  }
}

// Ranks of the leader's host saw that it was only starved and kept following it. The others took the next leader, which
// then declared those ranks lost, although they were healthy.
TEST(DetectorSimulation, AStarvedLeaderDoesNotSplitItsHostFromTheOthers) {
  SimulatedWorld world({.hosts = {0, 1, 0, 0}});
  world.at(1, [&] { world.hold(0, 15, 'R'); });
  expect_quiet(world);
  for (const int rank : {1, 2, 3}) {
    EXPECT_FALSE(world.process(rank).core->is_excluded()) << rank;
    EXPECT_EQ(world.process(rank).core->leader(), 1) << rank;
  }
}

// On one host a starved leader stays.
TEST(DetectorSimulation, AStarvedLeaderOfOneHostIsNotLost) {
  SimulatedWorld world({.hosts = {0, 0, 0}});
  world.at(1, [&] { world.hold(0, 15, 'R'); });
  expect_quiet(world);
  for (const int rank : {0, 1, 2}) EXPECT_EQ(world.process(rank).lost.size(), 0u) << rank;
}

// A rank that did not hear that the next leader is lost, too, dials it in vain, and comes late to the one after it.
TEST(DetectorSimulation, ARankThatDialsADeadLeaderFirstIsNotLost) {
  SimulatedWorld world({.hosts = {0, 1, 2, 3}});
  world.at(1, [&] { world.vanish(1); });
  world.at(1.1, [&] { world.kill_while_sending(0, 1); });  // only rank 2 hears that rank 1 is lost
  expect_quiet(world);
  for (const int rank : {2, 3}) {
    EXPECT_FALSE(world.process(rank).core->is_excluded()) << rank;
    EXPECT_EQ(world.process(rank).core->leader(), 2) << rank;
  }
}

// A leader kept querying the call of a rank that had left.
TEST(DetectorSimulation, ARankThatHasLeftIsNotQueriedForItsCall) {
  SimulatedWorld world({.hosts = {0, 0, 0}});
  world.at(1, [&] { world.abort(0, "g0", {.kind = ErrorKind::mismatch, .reason = "they differ"}, 7); });
  world.at(1.1, [&] { world.leave(2); });
  expect_quiet(world);
  EXPECT_EQ(world.process(1).aborted.count("g0"), 1u);
}

}  // namespace simulation
}  // namespace
}  // namespace maniple::harness
