// Decides what the nodes of a job do. Pure: events from nodes, timers and the user arrive as calls, and decisions leave
// through `Effects`.
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
// A failed rank uses up one restart; a membership change inside min:max does not. A node whose launcher gets SIGTERM
// leaves the job if enough other nodes remain. Otherwise, and for other signals, the job ends on all nodes.
//
// The job has one State and each node one NodeState; only enter() and move() change them. No State waits forever for
// nodes: `gathering` ends by its timers, the others because a silent node counts as lost (agent_link.h).
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launch/coordinate/agent_message.h"
#include "launch/coordinate/policies.h"
#include "launch/placement/rank_plan.h"

namespace maniple::launch {

struct CoordinatorOptions {
  NodeRange nodes = {};
  bool starts_agents = false;  ///< this launcher starts the nodes' agents, see Effects::start_agents
  RestartPolicy restarts = {};
  std::chrono::duration<double> join_timeout{300.0};
  std::chrono::duration<double> join_window{5.0};  ///< how long to wait for more nodes than the minimum
  std::chrono::duration<double> grace{0.8};        ///< between SIGTERM and SIGKILL
  std::chrono::duration<double> interrupt_grace{30.0};
};

class Coordinator {
 public:
  using Node = int;  ///< a handle chosen by the caller; not the node's rank
  /// verdict: the delay before the first failure is chosen, since a cause may be reported after its consequences.
  enum class Timer { join_timeout, join_window, reminder, verdict, restart };

  struct Effects {
    std::function<void(Node, const AgentMessage&)> send;
    std::function<void(Timer, std::chrono::duration<double>)> set_timer;
    std::function<void(Timer)> stop_timer;
    std::function<void(const std::string&)> print;  ///< to this launcher's user
    std::function<void()> start_agents = {};        ///< nodes are missing: restart their agents. May be empty
    std::function<void(int code)> done;             ///< called after the last `send`
  };
  enum class State { gathering, reserving, running, stopping, restart_delay, done };

  Coordinator(CoordinatorOptions options, Effects effects);
  void begin();

  void joined(Node node, const AgentMessage& join);
  void lost(Node node, const std::string& reason);
  void received(Node node, const AgentMessage& message);
  void on_timer(Timer timer);
  /// Ends the job. `host` received the signal; shown to people, may be empty.
  void interrupt(int signal, const std::string& host = {});
  /// Passes a signal on to all workers of the job. Nothing is shown to the user of `from`.
  void pass_on(Node from, int signal, const std::string& host);
  /// Ends the job because of an error in the launcher itself, for instance a closed output.
  void fail(const std::string& text, int code);

  State state() const noexcept { return state_; }
  /// Restarts after a failure; membership changes do not count.
  int restarts() const noexcept { return restarts_; }
  int world_size() const noexcept { return world_size_; }
  std::size_t node_count() const noexcept { return nodes_.size(); }

 private:
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

  void enter(State state);
  void move(Node node, NodeState state);
  std::string refusal(const AgentMessage& join) const;
  std::string missing() const;
  int staying() const;
  void check_start();
  void form_group();
  void start_all(const AgentMessage& reserved);
  void decide();
  void check_absent();
  void check_finished();
  bool leave(Node node, int signal);
  void release(Node node);
  void show_on_all(const std::string& text);
  void follow(Next next, int code);
  void stop_all(int signal, std::chrono::duration<double> grace, int reported = -1, int unseen = -1);
  void check_stopped();
  void quit(int code, const std::string& text);
  std::vector<Node> in_order() const;

  CoordinatorOptions options_;
  Effects effects_;
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
