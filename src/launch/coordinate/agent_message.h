// The messages between the launchers of one job. One of them coordinates (see coordinator.h); each node, the
// coordinator's own too, carries out what it is sent and reports.
//
//   node       join                                     coordinator
//                                             job       what to run (only for nodes that were started by the
//                                                       coordinator)
//                                         reserve       to the node of rank 0: find an address and port for rank 0
//              reserved
//                                           start       your assignments
//              failed, finished
//              waiting, absent                          a rank waits in init(); one exited with 0 without having called
//                                                       it
//              exited                                   a rank exited with 0: the first of the node
//              interrupt                                a signal (Ctrl-C) ended the job here
//                                     verdict, stop       what to show the user; end your workers
//              stopped
//              signal                     signal       pass it on to your workers (Ctrl-Z on one node stops all)
//                                            quit       exit with this code
//              alive                       alive       every so often, see agent_link.h
//              dropped                   dropped       you were silent for too long: you no longer belong to the job
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
  int restarts = 0;    ///< start: how often the group was started again after a failure
  int node_rank = -1;  ///< join: the requested one, -1 for any
  int node_count = 0;
  int processes = 0;  ///< join: how many this node takes, 0 for what the job says
  int devices_per_process = 0;
  int first_rank = 0;  ///< start: global rank of the node's first process
  int world_size = 0;
  int core_first = 0;  ///< start: the node's first among the ranks that share the cores of its machine
  int core_total = 0;  ///< start: how many ranks do
  int min_nodes = 0;   ///< join: --nnodes of the node, to be compared
  int max_nodes = 0;
  int signal = 0;         ///< stop, interrupt, signal
  int grace_ms = 0;       ///< stop
  int code = 0;           ///< quit
  int port = 0;           ///< reserved, start
  int heartbeat_ms = 0;   ///< alive: between two of them
  int silence_ms = 0;     ///< alive: the longest silence; dropped: how long it was
  std::string host = {};  ///< join: the name of the host; reserved, start: address for rank 0
  std::string text = {};  ///< verdict, quit, signal: for people; may be empty. job, start: the name of the job.
                          ///< join: core_set_id()
  std::vector<std::string> settings = {};  ///< job: settings, see job_settings.h. join: a name of the launcher's
                                           ///< process, by which one that connects again is recognised
  RankExit exit = {};  ///< failed, absent; waiting, exited: its rank; stop: the reported cause's rank, -1: none

  friend bool operator==(const AgentMessage&, const AgentMessage&) = default;
};

std::string encode(const AgentMessage& message);
/// Throws ProtocolError.
AgentMessage decode_agent_message(std::string_view bytes);

inline constexpr std::size_t kMaxAgentMessage = std::size_t{1} << 20;

}  // namespace maniple::launch
