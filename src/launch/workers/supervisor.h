// The supervisor: the process that the user sees. It passes signals on to the agent and returns the agent's exit code.
//
// `maniple run` consists of three processes:
// - The supervisor, the first process, stays in the foreground.
// - The reaper, its child, waits for the agent's end and then ends all of the agent's descendants. It also starts the
//   MPS daemon of --share-gpu before the agent and stops it afterwards. The reaper has a session and a process name of
//   its own, so that it survives when the launcher's processes are killed by process group or by name.
// - The agent, the reaper's child, leads a session of its own and is the parent of the workers (agent_process.h).
//
// All three adopt orphans: if any two of them are killed, the third ends the remaining processes.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>

#include "comm/base/unique_fd.h"
#include "launch/process/process_table.h"

namespace maniple::launch {

class MpsDaemon;

/// Starts the agent (a process that runs `agent` with its end of the control socket) and supervises it until it ends.
/// Must be called before this process starts threads. `daemon`, which may be null, is started before the agent and
/// stopped after it. It is a child of the reaper, because the agent ends all its own descendants whenever it ends the
/// workers.
int run_supervised(const std::function<int(UniqueFd control)>& agent, MpsDaemon* daemon = nullptr);

/// Ends the daemon passed to run_supervised(), if any. For an agent whose supervisor, and perhaps reaper, is gone.
void stop_daemon() noexcept;

/// The pid of the agent's supervisor; without a supervisor, the parent of this process.
pid_t supervisor_pid() noexcept;

/// True if the process's group is in the terminal's foreground, it has no terminal, or `stat` is empty. Pure.
bool has_terminal(const std::optional<ProcessStat>& stat);

/// has_terminal() for the supervisor, because the agent has no terminal. A job started with & or stopped by Ctrl-Z must
/// not draw over the shell's prompt or take its input.
bool in_foreground();

}  // namespace maniple::launch
