// Decides what the nodes of a job do. A pure state machine: events and the time go in, effects come out.
//
//   for (const Effect& effect : coordinator.handle(event::Joined{node, join}, now)) carry_out(effect);
//   if (const auto due = coordinator.next_timer()) ...   // and then handle(event::Tick{}, now)
//
//   gathering --enough nodes--> reserving --port for rank 0--> running --all finished--> (done, exit 0)
//       ^                                                         |
//       |                             a rank failed, a node was lost or joined, Ctrl-C
//       |                                                         v
//       +-- restart_delay <- start again? ---- all stopped ---- stopping ----> (done, exit code of the first failure)
//
// coordinator.cpp handles membership and forms groups. coordinator_run.cpp handles a running group: the first failure,
// signals, stopping. coordinator_agent.cpp connects the coordinator with the nodes, the clock and the terminal.
//
// In an elastic job, elastic_members.h decides about workers while the state is `running`: ranks that fail, nodes that
// are lost, join or leave.
//
// A failed rank uses up one restart; a membership change inside min:max does not. A node whose launcher gets SIGTERM
// leaves the job if enough other nodes remain. Otherwise, and for other signals, the job ends on all nodes.
//
// The job has one State and each node one NodeState; only enter() and move() change them. No State waits forever for
// nodes: `gathering` ends by its timers, the others because a silent node counts as lost (agent_link.h).
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "launch/coordinate/agent_message.h"
#include "launch/coordinate/elastic_members.h"
#include "launch/coordinate/policies.h"

namespace maniple::launch {

using Node = int;  ///< a handle chosen by the caller; not the node's rank

/// What happens to the coordinator.
namespace event {

struct Begin {};
struct Joined {
  Node node;
  message::Join join;
};
struct Lost {
  Node node;
  std::string reason;
};
struct Received {
  Node node;
  AgentMessage message;
};
/// Ends the job. `host` received the signal; shown to people, may be empty.
struct Interrupted {
  int signal;
  std::string host = {};
};
/// A signal for all workers of the job. Nothing is shown to the user of `from`.
struct PassOn {
  Node from;
  int signal;
  std::string host = {};
};
/// `maniple resize`.
struct Resize {
  int workers;
};
/// An error in the launcher itself, for instance a closed output, ends the job.
struct Broken {
  std::string text;
  int code;
};
/// A timer may be due.
struct Tick {};

}  // namespace event
using Event = std::variant<event::Begin, event::Joined, event::Lost, event::Received, event::Interrupted, event::PassOn,
                           event::Resize, event::Broken, event::Tick>;

/// What the coordinator wants done, in this order.
namespace effect {

struct Send {
  Node node;
  AgentMessage message;
};
/// For this launcher's user.
struct Print {
  std::string text;
};
/// Nodes are missing: their agents are to be started again.
struct StartAgents {};
/// To event::Resize.
struct Answer {
  bool accepted;
  std::string text;
};
/// The job has ended. Only refusals of late nodes follow.
struct Done {
  int code;
};

}  // namespace effect
using Effect = std::variant<effect::Send, effect::Print, effect::StartAgents, effect::Answer, effect::Done>;

class Coordinator {
 public:
  /// Seconds on any clock that does not go back.
  using Time = std::chrono::duration<double>;
  enum class State { gathering, reserving, running, stopping, restart_delay, done };

  explicit Coordinator(CoordinatorOptions options)
      : options_(options),
        elastic_(options.elastic, options.restarts, options.join_timeout,
                 options.nodes.max > 1 || options.starts_agents) {}

  std::vector<Effect> handle(const Event& event, Time now);
  /// When the next timer is due; empty: none is set.
  std::optional<Time> next_timer() const;

  State state() const noexcept { return state_; }
  /// Restarts after a failure; membership changes do not count.
  int restarts() const noexcept { return restarts_; }
  int generation() const noexcept { return generation_; }  ///< -1: no group was formed yet
  int world_size() const noexcept { return options_.elastic && generation_ >= 0 ? elastic_.active() : world_size_; }
  std::size_t node_count() const noexcept { return nodes_.size(); }

 private:
  /// verdict: the delay before the first failure is chosen, since a cause may be reported after its consequences.
  enum class Timer { join_timeout, join_window, reminder, verdict, restart, members };
  enum class NodeState {
    idle,      // not in the current generation
    assigned,  // has a node rank in the current generation, but `start` was not sent yet
    running,   // `start` was sent
    finished,  // all its workers have exited with 0
    stopping,  // `stop` was sent
    leaving,   // `stop` was sent, and the node leaves the job once its workers have ended
  };
  struct NodeInfo {
    std::string host;
    std::string core_set;  // nodes with the same set share cores
    int requested_rank = -1;
    int processes = 1;
    int devices_per_process = 0;
    NodeState state = NodeState::idle;
    int node_rank = -1;  // in the last generation it belonged to; -1: none
    bool in_group() const noexcept { return state != NodeState::idle; }
    bool has_workers() const noexcept {
      return state == NodeState::running || state == NodeState::stopping || state == NodeState::leaving;
    }
  };
  /// What follows when all nodes have stopped. A value later in this list replaces an earlier one, never the reverse.
  enum class Next { regroup, restart_if_allowed, quit };

  void on(const event::Begin&) { enter(State::gathering); }
  void on(const event::Joined& event);
  void on(const event::Lost& event);
  void on(const event::Received& event);
  void on(const event::Interrupted& event) { interrupt(event.signal, event.host); }
  void on(const event::PassOn& event);
  void on(const event::Resize& event);
  void on(const event::Broken& event);
  void on(const event::Tick&);
  void on_timer(Timer timer);

  void on_message(Node node, const message::Interrupt& message);
  void on_message(Node node, const message::Signal& message) { on(event::PassOn{node, message.signal, message.host}); }
  void on_message(Node node, const message::Reserved& message);
  void on_message(Node node, const message::Failed& message);
  void on_message(Node node, const message::Absent& message);
  void on_message(Node node, const message::Waiting& message);
  void on_message(Node node, const message::Exited& message);
  void on_message(Node node, const message::Finished& message);
  void on_message(Node node, const message::Stopped& message);
  void on_message(Node node, const message::Noticed& message);
  bool is_current(Node node, int generation) const;
  bool is_training() const { return options_.elastic && state_ == State::running; }

  void send(Node node, AgentMessage message) { effects_.emplace_back(effect::Send{node, std::move(message)}); }
  void print(std::string text) { effects_.emplace_back(effect::Print{std::move(text)}); }
  void set_timer(Timer timer, Time delay) { timers_[timer] = now_ + delay; }
  void enter(State state);
  void move(Node node, NodeState state);
  std::string refusal(const message::Join& join) const;
  std::string missing() const;
  int staying() const;
  void check_start();
  void form_group();
  void start_all(const message::Reserved& reserved);
  void decide();
  // An elastic job: coordinator_elastic.cpp.
  void carry_out(const MemberActions& actions);
  void carry_out(const members::Form& form);
  void carry_out(const members::Replace& replace);
  void carry_out(const members::Ask& ask);
  void carry_out(const members::Kill& kill);
  void carry_out(const members::Print& shown) { print(shown.text); }
  void carry_out(const members::End& end);
  void carry_out(const members::Finish& finish);
  void begin_elastic(const message::Reserved& reserved);
  void admit(Node node);
  void publish(const message::Reserved& reserved);
  void end_elastic(int code);
  void lose_elastic(Node node, const NodeInfo& info, const std::string& text);
  bool leave_elastic(Node node, int signal);
  void check_absent();
  void check_finished();
  bool leave(Node node, int signal);
  void release(Node node);
  void show_on_all(const std::string& text);
  void follow(Next next, int code);
  void interrupt(int signal, const std::string& host);
  void stop_all(int signal, std::chrono::duration<double> grace, std::vector<int> reported = {});
  void check_stopped();
  void quit(int code, const std::string& text);
  std::vector<Node> in_order() const;

  CoordinatorOptions options_;
  // In an elastic job:
  ElasticMembers elastic_;
  std::optional<members::Form> forming_;  // waits for a port for rank 0
  std::optional<int> ends_with_;          // the job ends with this code when `forming_` is published
  message::Reserved first_address_;       // of the job's first rank 0
  Time now_{0};
  std::map<Timer, Time> timers_;
  std::vector<Effect> effects_;  // of the current event
  State state_ = State::gathering;
  std::map<Node, NodeInfo> nodes_;  // in order of arrival
  int generation_ = -1;
  int world_size_ = 0;
  int failures_ = 0;
  int restarts_ = 0;
  std::set<std::string> lost_hosts_;  // since the last group was formed
  // State of the current generation:
  std::vector<RankExit> exits_;
  std::vector<RankExit> ended_;     // ranks that exited with 0
  std::optional<RankExit> absent_;  // a rank that exited with 0 without calling init()
  std::optional<int> waiting_;      // a rank that waits in init() for the others
  std::string first_done_;          // describes the first rank that exited with 0; empty: none yet
  Next next_ = Next::regroup;
  int code_ = 0;  // the job's exit code, if next_ is quit
};

}  // namespace maniple::launch
