// Calls of MPI that block for as long as another rank does not come, made in a thread that can be left behind.
#pragma once

#include <functional>

#include "backend/plugin/plugin.h"

namespace maniple::mpi_engine {

/// Runs `body` in a thread of its own and waits for it, looking at the group's abort and the deadline. What `body` throws is
/// thrown here. False: given up; the thread stays inside MPI until the process ends, so `body` must own all that it uses.
bool run_detached(std::function<void()> body, const AbortToken& abort, Deadline deadline);

}  // namespace maniple::mpi_engine
