// The messages between the launchers of one job. One launcher coordinates (see coordinator.h). Every node, including
// the coordinator's own, carries out the coordinator's messages and reports back.
//
//   node       join                                     coordinator
//                                             job       what to run (only for nodes that the coordinator started)
//                                         reserve       to the node of rank 0: find an address and port for rank 0
//              reserved
//                                           start       your assignments
//              failed, finished
//              waiting, absent                          a rank waits in init(); a rank exited with 0 without calling
//                                                       init()
//              exited                                   a rank exited with 0 while others of the node work
//              interrupt                                a signal (Ctrl-C) ended the job here
//                                     verdict, stop       text for the user; end your workers
//              stopped
//              signal                     signal       pass it on to your workers (Ctrl-Z on one node stops all)
//                                            quit       exit with this code
//              alive                       alive       heartbeat, see agent_link.h
//              dropped                   dropped       you were silent for too long and no longer belong to the job
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "launch/process/failure_report.h"

namespace maniple::launch {

struct AgentMessage {
  enum class Kind : std::uint8_t {
    join = 1,
    job,
    reserve,
    reserved,
    start,
    failed,
    finished,
    interrupt,
    verdict,
    stop,
    stopped,
    quit,
    signal,
    alive,
    dropped,
    absent,
    waiting,
    exited,
  };
  Kind kind = Kind::join;
  int generation = 0;
  int restarts = 0;    ///< start: restarts after a failure so far
  int node_rank = -1;  ///< join: the requested node rank, -1 for any
  int node_count = 0;
  int processes = 0;  ///< join: processes on this node, 0 for the job's setting
  int devices_per_process = 0;
  int first_rank = 0;  ///< start: global rank of the node's first process
  int world_size = 0;
  int core_first = 0;  ///< start: index of the node's first rank among the ranks on its machine's cores
  int core_total = 0;  ///< start: number of ranks that share its machine's cores
  int min_nodes = 0;   ///< join: the node's --nnodes, which must match the coordinator's
  int max_nodes = 0;
  int signal = 0;                          ///< stop, interrupt, signal
  int grace_ms = 0;                        ///< stop
  int code = 0;                            ///< quit
  int port = 0;                            ///< reserved, start
  int heartbeat_ms = 0;                    ///< alive: heartbeat interval
  int silence_ms = 0;                      ///< alive: the longest allowed silence; dropped: the actual silence
  std::string host = {};                   ///< join: host name; reserved, start: address for rank 0
  std::string text = {};                   ///< verdict, quit, signal: for people; may be empty. job, start: job name.
                                           ///< join: core_set_id()
  std::vector<std::string> settings = {};  ///< job: settings, see job_settings.h. join: a name for the launcher
                                           ///< process, which identifies it when it reconnects
  RankExit exit = {};  ///< failed, absent: the exit; exited: the exit; waiting: its rank; stop: the ranks
                       ///< that were shown as the cause are its rank and the blamed one, or -1

  friend bool operator==(const AgentMessage&, const AgentMessage&) = default;
};

std::string encode(const AgentMessage& message);
/// Throws ProtocolError.
AgentMessage decode_agent_message(std::string_view bytes);

inline constexpr std::size_t kMaxAgentMessage = std::size_t{1} << 20;

}  // namespace maniple::launch
