// The messages between the launchers of one job. One launcher coordinates (see coordinator.h). Every node, including
// the coordinator's own, carries out the coordinator's messages and reports back.
//
//   node       Join                                     coordinator
//                                             Job
//                                         Reserve
//              Reserved
//                                           Start
//              Waiting, Absent, Exited, Failed, Finished
//              Interrupt
//                                   Verdict, Stop
//              Stopped
//              Signal                      Signal
//             Noticed      Members, Replace, Kill, Finish
//                                            Quit
//              Alive                        Alive
//              Dropped                    Dropped
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "comm/base/overloaded.h"
#include "launch/launch_options.h"
#include "launch/process/failure_report.h"
#include "launch/process/worker_messages.h"

namespace maniple::launch {

namespace message {

/// A node asks to belong to the job.
struct Join {
  int node_rank = -1;  ///< the requested node rank, -1 for any
  int processes = 0;   ///< on this node; 0: the job's setting
  int devices_per_process = 0;
  int min_nodes = 0;  ///< the node's --nnodes, which must match the coordinator's; 0: not given
  int max_nodes = 0;
  int min_workers = 0;  ///< the node's --elastic, likewise
  int max_workers = 0;
  std::string host = {};
  std::string core_set = {};  ///< core_set_id(): nodes with the same set share cores
  std::string launcher = {};  ///< names the launcher process, which identifies it when it reconnects; may be empty
  friend bool operator==(const Join&, const Join&) = default;
};

/// What to run, for nodes that the coordinator has started.
struct Job {
  std::string name = {};
  LaunchOptions options = {};  ///< see options_for_agents(): only what concerns every node is sent
  friend bool operator==(const Job&, const Job&) = default;
};

/// To the node of rank 0: find an address and a port for rank 0.
struct Reserve {
  int generation = 0;
  int members_generation = 0;  ///< in an elastic job: for which generation of workers; 0: for none yet
  friend bool operator==(const Reserve&, const Reserve&) = default;
};
struct Reserved {
  int generation = 0;
  int members_generation = 0;
  std::string host = {};
  int port = 0;            ///< 0: none, see `error`
  std::string error = {};  ///< for people
  friend bool operator==(const Reserved&, const Reserved&) = default;
};

/// The node's ranks.
struct Start {
  int generation = 0;
  int restarts = 0;  ///< restarts after a failure so far
  int node_rank = 0;
  int node_count = 0;
  int processes = 0;  ///< on this node
  int devices_per_process = 0;
  int first_rank = 0;  ///< global rank of the node's first process
  int world_size = 0;
  int core_first = 0;     ///< index of the node's first rank among the ranks on its machine's cores
  int core_total = 0;     ///< number of ranks that share its machine's cores
  std::string host = {};  ///< address for rank 0
  int port = 0;
  std::string job = {};     ///< the job's name; empty: known
  bool joins_late = false;  ///< in an elastic job: the other workers train already
  friend bool operator==(const Start&, const Start&) = default;
};

/// A rank waits in init() for all others.
struct Waiting {
  int generation = 0;
  int rank = 0;
  friend bool operator==(const Waiting&, const Waiting&) = default;
};
/// A rank exited with 0 without calling init().
struct Absent {
  int generation = 0;
  RankExit exit = {};
  friend bool operator==(const Absent&, const Absent&) = default;
};
/// A rank exited with 0 while others of the node work.
struct Exited {
  int generation = 0;
  RankExit exit = {};
  friend bool operator==(const Exited&, const Exited&) = default;
};
struct Failed {
  int generation = 0;
  RankExit exit = {};
  friend bool operator==(const Failed&, const Failed&) = default;
};
/// All ranks of the node have exited with 0.
struct Finished {
  int generation = 0;
  friend bool operator==(const Finished&, const Finished&) = default;
};

/// A signal, such as Ctrl-C, ended the job here.
struct Interrupt {
  int signal = 0;
  friend bool operator==(const Interrupt&, const Interrupt&) = default;
};

/// Text for the user.
struct Verdict {
  std::string text = {};
  friend bool operator==(const Verdict&, const Verdict&) = default;
};

/// End your workers.
struct Stop {
  int generation = 0;
  int signal = 0;
  int grace_ms = 0;
  std::vector<int> reported = {};  ///< ranks that the user was shown as the cause
  bool leaves = false;             ///< in an elastic job: the other nodes go on
  friend bool operator==(const Stop&, const Stop&) = default;
};
struct Stopped {
  int generation = 0;
  friend bool operator==(const Stopped&, const Stopped&) = default;
};

/// Pass a signal on to your workers: Ctrl-Z on one node stops all.
struct Signal {
  int signal = 0;
  std::string host = {};  ///< from a node: where the signal came from
  std::string text = {};  ///< for the user; may be empty
  friend bool operator==(const Signal&, const Signal&) = default;
};

// In an elastic job (elastic_members.h):

/// What a worker reports.
struct Noticed {
  int generation = 0;
  WorkerNotice notice = {};
  friend bool operator==(const Noticed&, const Noticed&) = default;
};
/// The next generation of workers.
struct Members {
  int generation = 0;
  int members_generation = 0;
  std::vector<int> members = {};  ///< their numbers, in rank order
  std::string host = {};          ///< where rank 0 serves the store
  int port = 0;
  friend bool operator==(const Members&, const Members&) = default;
};
/// Start a worker, for the first time or again.
struct Replace {
  int generation = 0;
  int worker = 0;
  bool joins_late = false;
  friend bool operator==(const Replace&, const Replace&) = default;
};
/// Send a worker this signal: SIGTERM asks it to leave.
struct Kill {
  int generation = 0;
  int worker = 0;
  int signal = 0;
  friend bool operator==(const Kill&, const Kill&) = default;
};
/// All workers of the job have ended. Reply with Finished.
struct Finish {
  int generation = 0;
  friend bool operator==(const Finish&, const Finish&) = default;
};

/// Exit with this code.
struct Quit {
  int code = 0;
  std::string text = {};  ///< for the user; may be empty
  friend bool operator==(const Quit&, const Quit&) = default;
};

/// A heartbeat, see agent_link.h.
struct Alive {
  int heartbeat_ms = 0;
  int silence_ms = 0;  ///< the longest allowed silence
  friend bool operator==(const Alive&, const Alive&) = default;
};
/// You were silent for too long and no longer belong to the job.
struct Dropped {
  int silence_ms = 0;
  friend bool operator==(const Dropped&, const Dropped&) = default;
};

}  // namespace message

/// On the wire a message begins with its place in this list.
using AgentMessage = std::variant<message::Join, message::Job, message::Reserve, message::Reserved, message::Start,
                                  message::Waiting, message::Absent, message::Exited, message::Failed,
                                  message::Finished, message::Interrupt, message::Verdict, message::Stop,
                                  message::Stopped, message::Signal, message::Quit, message::Alive, message::Dropped,
                                  message::Noticed, message::Members, message::Replace, message::Kill, message::Finish>;

/// Long texts are cut; a list that is too long is the peer's ProtocolError.
std::string encode(const AgentMessage& message);
/// Throws ProtocolError.
AgentMessage decode_agent_message(std::string_view bytes);

inline constexpr std::size_t kMaxAgentMessage = std::size_t{1} << 20;

}  // namespace maniple::launch
