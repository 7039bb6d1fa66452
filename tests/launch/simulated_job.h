// A job of simulated launchers and ranks around a real Coordinator. A seed decides everything that happens: when nodes
// come, are cut off, die and return, which ranks fail, when somebody presses Ctrl-C. The same seed gives the same job.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launch/coordinate/coordinator.h"

namespace maniple::launch {

/// Random numbers that are the same with every standard library.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next();
  int below(int limit) { return static_cast<int>(next() % static_cast<std::uint64_t>(limit)); }
  bool chance(int percent) { return below(100) < percent; }
  double between(double low, double high) { return low + (high - low) * static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

class SimulatedJob {
 public:
  explicit SimulatedJob(std::uint64_t seed);

  /// Runs the job to its end. Returns the first rule that was broken; empty: none.
  std::string run();
  /// What happened, a line for each event and effect, if it was recorded.
  const std::vector<std::string>& log() const noexcept { return log_; }
  void record() { recording_ = true; }

 private:
  /// What a launcher's workers do, as WorkerGroup's states.
  enum class Work { idle, working, finished, ending };
  struct Rank {
    bool running = true;
    bool ok = false;
  };
  struct Launcher {
    Node node = -1;  // of its connection; each connection has its own
    int host = 0;
    int requested_rank = -1;
    int processes = 1;
    bool alive = true;
    bool connected = false;
    double last_to = 0, last_from = 0;  // messages arrive in order
    Work work = Work::idle;
    int generation = -1;
    int first_rank = 0;
    std::vector<Rank> ranks = {};
    double started_at = 0;
    int started = 0;  // counts starts: events of an earlier start are void
    std::optional<int> leaving = {};
    bool returning = false;
  };
  /// What the ranks of a generation do, unless something happens to them.
  enum Plan { all_finish, one_fails, one_fails_and_others_finish, one_ends_early, one_is_absent, kPlans };
  /// The truth about one generation.
  struct Generation {
    int world_size = 0;
    int placed = 0;                            // ranks in the Starts so far
    int whole = 0;                             // ranks that have exited with 0
    std::map<int, double> roots;               // ranks whose end began on them, and when
    std::set<int> noticed;                     // ranks that failed or were blamed, as far as the coordinator knows
    std::map<Node, int> stops, kills, starts;  // messages to each node
    std::set<Node> finished;                   // whose Finished has arrived
    bool exit_known = false;                   // the coordinator knows that a rank has exited with 0
    bool stopped_knowing = false;              // the same, when it stopped the group
    bool reason = false;                       // a failure, a loss or a leave: the group may start again
    int plan = all_finish;
    int culprit = 0;
    double culprit_at = 0;
  };

  void at(double delay, std::function<void()> action) { at_time(now_ + delay, std::move(action)); }
  void at_time(double when, std::function<void()> action);
  void happened(const Event& event);
  void carry_out(const Effect& effect);
  void check_timers();
  void check_named(const std::string& text);
  void check_before_group();
  void broken(const std::string& rule);
  void note(const std::string& line);

  void add_launcher(int host, int requested_rank, double delay);
  void connect(std::size_t launcher);
  void cut(std::size_t launcher, bool dies);
  void lose_master(std::size_t launcher);
  double transit(Node node);
  void to_node(Node node, const AgentMessage& message);
  void from_node(std::size_t launcher, const AgentMessage& message);
  void received(std::size_t launcher, const AgentMessage& message);
  void start(std::size_t launcher, const message::Start& start);
  void stop(std::size_t launcher, bool at_once);
  void ended(std::size_t launcher);
  void leave(std::size_t launcher, int code);
  void end_rank(std::size_t launcher, int started, int local, RankExit exit);
  void spread(int generation, int root);
  void schedule_faults();
  void act();

  static constexpr Node kOwnNode = 0;

  struct Action {
    double when;
    std::uint64_t number;
    std::function<void()> action;
    bool operator<(const Action& other) const noexcept {
      return when != other.when ? when > other.when : number > other.number;
    }
  };

  Dice dice_;
  CoordinatorOptions options_;
  Coordinator coordinator_;
  bool quick_ = true;  // messages take less time than the coordinator waits before it names a cause
  double now_ = 0;
  std::uint64_t actions_ = 0;
  std::vector<Action> queue_;  // a heap
  std::vector<Event> pending_;
  bool handling_ = false;
  std::vector<Launcher> launchers_;
  std::map<Node, std::size_t> by_node_;
  Node next_node_ = 1;
  std::map<int, Generation> generations_;
  int events_ = 0;
  int interrupt_at_ = -1;  // before this event
  int interrupts_ = 0;
  double interrupted_at_ = 0;
  bool ends_ = false;       // an error or a signal at a node ends the job, or may
  int expected_code_ = -1;  // after Ctrl-C; -1: another end may have come first
  std::optional<int> result_;
  std::string broken_;
  bool recording_ = false;
  std::vector<std::string> log_;
};

}  // namespace maniple::launch
