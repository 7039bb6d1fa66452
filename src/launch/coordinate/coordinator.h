// Decides what the nodes of a job do. Pure: nodes, time and the user come in as calls, decisions go out through
// `Effects`.
//
//   gathering --enough nodes--> reserving --port for rank 0--> running --all finished--> (done, exit 0)
//       ^                                                         |
//       |                             a rank failed, a node was lost or joined, Ctrl-C
//       |                                                         v
//       +-- restart_delay <- start again? ---- all stopped ---- stopping ----> (done, exit code of the first failure)
//
// coordinator.cpp has who belongs to the job and how a group is formed, coordinator_run.cpp what happens while it runs
// (which failure was the first, signals, stopping). coordinator_agent.cpp connects it with the nodes, the clock and the
// terminal.
//
// A failed rank costs a restart; a change of membership inside min:max does not. A node whose launcher gets SIGTERM
// leaves the job if enough others remain; otherwise, and with other signals, the job ends on all nodes.
//
// The job is in one State and each node in one NodeState; enter() and move() are the only ways into them. Every State
// in which the job waits for nodes ends: `gathering` by its timers, the others because a silent node counts as lost
// (agent_link.h).
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
  bool starts_agents = false;  ///< nodes are agents that this launcher starts, see Effects::start_agents
  RestartPolicy restarts = {};
  std::chrono::duration<double> join_timeout{300.0};
  std::chrono::duration<double> join_window{5.0};  ///< how long to wait for more than the least number of nodes
  std::chrono::duration<double> grace{0.8};        ///< between SIGTERM and SIGKILL
  std::chrono::duration<double> interrupt_grace{30.0};
};

class Coordinator {
 public:
  using Node = int;  ///< a name for a node, chosen by the caller; not its rank
  /// verdict: until it is decided which failure was the first (a cause may be seen later than its consequences).
  enum class Timer { join_timeout, join_window, reminder, verdict, restart };

  struct Effects {
    std::function<void(Node, const AgentMessage&)> send;
    std::function<void(Timer, std::chrono::duration<double>)> set_timer;
    std::function<void(Timer)> stop_timer;
    std::function<void(const std::string&)> print;  ///< to the user of this launcher
    std::function<void()> start_agents = {};        ///< nodes are missing: start their agents again. May be empty
    std::function<void(int code)> done;             ///< after everything was sent
  };
  enum class State { gathering, reserving, running, stopping, restart_delay, done };

  Coordinator(CoordinatorOptions options, Effects effects);
  void begin();

  void joined(Node node, const AgentMessage& join);
  void lost(Node node, const std::string& reason);
  void received(Node node, const AgentMessage& message);
  void on_timer(Timer timer);
  /// Ends the job; `host` is where the signal came, for people (may be empty).
  void interrupt(int signal, const std::string& host = {});
  /// A signal for all workers of the job; the user of `from` is not told.
  void pass_on(Node from, int signal, const std::string& host);
  /// Ends the job because of the launcher itself (its output was closed, for instance).
  void fail(const std::string& text, int code);

  State state() const noexcept { return state_; }
  /// How often the group was started again after a failure; changes of membership do not count.
  int restarts() const noexcept { return restarts_; }
  int world_size() const noexcept { return world_size_; }
  std::size_t node_count() const noexcept { return nodes_.size(); }

 private:
  enum class NodeState {
    idle,      // not in the present generation
    assigned,  // has a rank in it, but nothing was started there yet
    running,   // was sent its assignments
    finished,  // all of its workers have exited with 0
    stopping,  // was told to end its workers
    leaving,   // the same, and it leaves the job when they have ended
  };
  struct NodeInfo {
    std::string host;
    std::string core_set;  // nodes with the same set share its cores
    int requested_rank = -1;
    int processes = 1;
    int devices_per_process = 0;
    NodeState state = NodeState::idle;
    int node_rank = -1;  // of the last generation that it was in; -1: none
    bool in_group() const noexcept { return state != NodeState::idle; }
    bool has_workers() const noexcept {
      return state == NodeState::running || state == NodeState::stopping || state == NodeState::leaving;
    }
  };
  /// What follows when all nodes have stopped. A later one replaces an earlier one, never the reverse.
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
  void stop_all(int signal, std::chrono::duration<double> grace, int reported = -1);
  void check_stopped();
  void quit(int code, const std::string& text);
  std::vector<Node> in_order() const;

  CoordinatorOptions options_;
  Effects effects_;
  State state_ = State::gathering;
  std::map<Node, NodeInfo> nodes_;  // in the order of arrival
  int generation_ = -1;
  int world_size_ = 0;
  int failures_ = 0;
  int restarts_ = 0;
  std::set<std::string> lost_hosts_;  // since a group was formed last
  // Of the present generation:
  std::vector<RankExit> exits_;
  std::optional<RankExit> absent_;  // exited with 0 without having called init()
  std::optional<int> waiting_;      // a rank that waits in init() for all
  std::string first_done_;          // who exited with 0 first, for people; empty: none yet
  Next next_ = Next::regroup;
  int code_ = 0;  // the job's exit code, if it quits
};

}  // namespace maniple::launch
