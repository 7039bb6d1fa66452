// A world of failure detectors without processes and sockets: cores (comm/session/detector_core.h) that exchange
// messages over a simulated network, in simulated time. Nothing is random here: see detector_simulation_test.cpp.
//
//   SimulatedWorld world({.hosts = {0, 0, 1}});
//   world.at(1.5, [&] { world.kill(2); });
//   world.run_until_quiet(20);
//   world.process(0).lost;  // what rank 0's session was told
//
// Times are in seconds. A process that is held (stopped, starved) receives nothing until it continues; then it reads
// everything that has arrived before its timers run, as the event loop does.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/session/detector_core.h"

namespace maniple::harness {

constexpr double kForever = 1e9;

class SimulatedWorld {
 public:
  struct Options {
    std::vector<int> hosts = {};  ///< of each rank
    double heartbeat_s = 2.5;
    std::uint64_t seed = 1;     ///< of the delays
    double least_delay = 1e-4;  ///< of a message
    double most_delay = 1e-3;
    bool connected = true;  ///< all ranks have joined; otherwise see join()
    bool log = false;       ///< print what happens
  };
  enum class State { joining, alive, leaving, left, dead };

  struct Process {
    std::unique_ptr<detector::Core> core;
    State state = State::alive;
    bool vanished = false;  // with its host: no connection is closed
    double held_until = 0;
    char held_as = 'R';
    std::map<int, int> links = {};  // peer -> connection
    int dial = 0;                   // the current one; 0: none
    std::set<int> probing = {};
    double wake_at = std::numeric_limits<double>::infinity();
    int dies_after = -1;                              // messages of a broadcast
    std::map<std::uint64_t, std::string> calls = {};  // of group "g0"
    // What its session was told.
    std::map<int, std::vector<std::string>> lost = {};
    std::map<int, int> gone = {};
    std::map<std::string, std::vector<ErrorInfo>> aborted = {};
    std::map<int, double> heard = {};              // when something last arrived from a peer
    std::optional<detector::Shrink> shrinks = {};  // its last request
    std::vector<std::int32_t> made = {};           // the members of the group that it made last
    std::optional<detector::Survivors> survived = {};
  };

  explicit SimulatedWorld(Options options);

  int size() const { return static_cast<int>(processes_.size()); }
  Process& process(int rank) { return processes_[static_cast<std::size_t>(rank)]; }
  const Process& process(int rank) const { return processes_[static_cast<std::size_t>(rank)]; }
  bool runs(int rank) const { return process(rank).state == State::alive && !process(rank).vanished; }
  double now() const { return now_; }

  // ---- Faults and actions; `at` runs them later
  void at(double when, std::function<void()> action);
  void join(int rank);  ///< rank connects to rank 0; rank 0 expects all ranks
  void expect_all(double until) { handle(0, detector::ExpectAll{time(until)}); }
  void kill(int rank);
  void kill_while_sending(int rank, int sends);  ///< in its next broadcast, after that many messages
  void vanish(int rank);
  void leave(int rank);
  void hold(int rank, double until, char state);  ///< 'T' stopped, 'R' starved
  void cut(int from, int to, double until);       ///< one way; what is sent meanwhile arrives afterwards, if ever
  void break_connection(int a, int b);
  void abort(int rank, const std::string& group, ErrorInfo error, std::uint64_t seq);
  void announce(int rank, detector::Message message);
  /// The rank waits for the survivors of a group of all ranks, and makes the groups that are decided.
  void shrink(int rank);
  void on_failure(std::function<void(int rank)> callback) { on_failure_ = std::move(callback); }

  /// Runs until the time or the first broken rule.
  void run(double until);
  /// Runs until nothing is under way. False if that is not so at `limit`.
  bool run_until_quiet(double limit);
  std::string why_not_quiet() const;  ///< empty: quiet
  /// The first rule that was broken; empty: none.
  const std::string& broken() const { return broken_; }
  void fail(const std::string& what);

 private:
  enum class Kind : std::uint8_t {
    message,
    end,
    handshake,
    dialed,
    dial_failed,
    dial_limit,
    refused,
    wake,
    resume,
    action
  };
  struct Item {
    double at = 0;
    std::uint64_t order = 0;
    Kind kind = Kind::message;
    int rank = 0;  // where it happens
    int peer = 0;
    int number = 0;    // connection, dial
    int content = -1;  // of contents_ or actions_; -1: a heartbeat
    bool operator<(const Item& other) const { return at != other.at ? at > other.at : order > other.order; }
  };
  struct Connection {
    int ends[2] = {};
    double last_arrival[2] = {};  // at that end; the order is kept
    bool open[2] = {true, true};
  };

  static detector::Time time(double seconds) {
    return detector::Time(
        std::chrono::duration_cast<detector::Clock::duration>(std::chrono::duration<double>(100 + seconds)));
  }
  static double seconds(detector::Time time) {
    return std::chrono::duration<double>(time.time_since_epoch()).count() - 100;
  }
  double random();
  double delay();
  double passes_at(int from, int to, double when) const;
  void push(Item item);
  void happen(Item& item);
  void deliver(Item& item);
  void handle(int rank, detector::Event event);
  void execute(int rank, detector::Effect& effect, bool relayed);
  void check_effects(int rank);
  void check_timers(int rank);
  char state_of(int rank) const;
  bool is_seen_alive(int rank, int other) const;
  void send(int rank, const detector::Send& send);
  void dial(int rank, const detector::Dial& dial);
  void end(int connection, int side);
  int side_of(int connection, int rank) const;
  void drop_links(int rank);
  int connect(int a, int b);
  bool listens(int rank) const;
  void note(int rank, const std::string& what) const;
  void decide(int rank, const detector::Survivors& decision);
  void make_group(int rank, const detector::Survivors& decision);
  void check_loss(int rank, const detector::ReportLost& report, bool relayed);
  static bool counts(const Item& item);

  Options options_;
  std::vector<Process> processes_;
  std::vector<Connection> connections_;
  std::map<std::pair<int, int>, double> cuts_;
  std::vector<Item> queue_;
  std::vector<std::vector<Item>> backlogs_;
  std::vector<detector::Message> contents_;
  std::vector<int> free_contents_;
  std::vector<std::function<void()>> actions_;
  std::function<void(int)> on_failure_;
  std::set<std::pair<int, int>> open_dials_;  // (rank, dial)
  std::size_t under_way_ = 0;                 // messages other than heartbeats, ends, dials, actions
  std::uint64_t order_ = 0;
  std::uint64_t random_;
  int dials_ = 0;
  double now_ = 0;
  struct Pending {
    int rank;
    bool relayed;  // the event was a message
    detector::Effect effect;
  };
  std::vector<Pending> effects_;
  detector::Effects produced_;
  bool executing_ = false;
  std::string broken_;
};

}  // namespace maniple::harness
