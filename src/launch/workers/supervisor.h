// The process that the user sees: passes signals on to the agent and returns its exit code.
//
// `maniple run` is three processes. The first, the supervisor, stays in the foreground. The last, the agent, leads a
// session of its own and has the workers as children (agent_process.h). Between them stands the reaper, which does
// nothing but wait for the agent's end and then ends whatever descends from it (and, before and after, starts and stops
// the MPS daemon of --share-gpu). It has a session and a name of its own, so that whoever kills the launcher's
// processes together, by process group or by name, does not kill it as well. All three adopt orphans: of any two that
// are killed, the third ends what is left.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>

#include "comm/base/unique_fd.h"
#include "launch/process/process_table.h"

namespace maniple::launch {

class MpsDaemon;

/// Makes the agent (a child that runs `agent` with its end of the control socket) and supervises it until it has ended.
/// Must be called before this process has any thread. `daemon`, which may be null, is started before the agent and
/// stopped after it: it is a child of the reaper, as the agent ends all that descends from itself whenever it ends the
/// workers.
int run_supervised(const std::function<int(UniqueFd control)>& agent, MpsDaemon* daemon = nullptr);

/// Ends the daemon of run_supervised(), if there is one: for an agent whose supervisor is gone, and the reaper perhaps,
/// too.
void stop_daemon() noexcept;

/// The supervisor, for the agent; without one, the parent of this process.
pid_t supervisor_pid() noexcept;

/// Its process group has the terminal, or it has no terminal at all, or nothing is known. Pure.
bool has_terminal(const std::optional<ProcessStat>& stat);

/// The same of the supervisor: the agent has no terminal of its own to ask. A job that was started with & or stopped by
/// Ctrl-Z does not draw over the shell's prompt, and does not take its input.
bool in_foreground();

}  // namespace maniple::launch
