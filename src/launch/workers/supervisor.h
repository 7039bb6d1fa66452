// The process that the user sees: passes signals on to the agent and returns its exit code. Between the two stands a third,
// the keeper, which does nothing but wait for the agent's end and then ends whatever descends from it. It has a session
// and a name of its own, so that whoever kills the launcher's processes together, by process group or by name, does not
// kill it as well. All three adopt orphans: of any two that are killed, the third ends what is left.
#pragma once

#include <sys/types.h>

#include <functional>

#include "base/unique_fd.h"

namespace maniple::launch {

/// Makes the agent (a child that runs `agent` with its end of the control line) and stays in front of it until it has
/// ended. Must be called before this process has any thread.
int run_supervised(const std::function<int(UniqueFd control)>& agent);

/// The process in front, for the agent; without one, the parent of this process.
pid_t supervisor_pid() noexcept;

}  // namespace maniple::launch
