// The process that the user sees: passes signals on to the agent and returns its exit code.
#pragma once

#include <functional>

#include "base/unique_fd.h"

namespace maniple::launch {

/// Makes the agent (a child that runs `agent` with its end of the control line) and stays in front of it until it has
/// ended. Must be called before this process has any thread.
int run_behind_front(const std::function<int(UniqueFd control)>& agent);

}  // namespace maniple::launch
