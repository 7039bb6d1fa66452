// All processes that descend from this one. The launcher is a "subreaper": what its workers leave behind becomes its own
// child, so nothing gets away by starting a session of its own.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace maniple::launch {

/// From now on orphans among the descendants become children of this process, not of init.
void adopt_orphans() noexcept;

/// Children, their children, and so on, without `except` and what descends from it.
std::vector<pid_t> descendants(pid_t except = 0);

/// Sends the signal to all of them, several times over until no new ones appear.
void signal_descendants(int signal, pid_t except = 0);

/// Kills all descendants and waits for them, at most `limit_ms`. What is left is returned: processes that the kernel
/// cannot end (state D).
std::vector<pid_t> end_descendants(int limit_ms);

/// "pid 4711 (tar, state D)".
std::string describe_process(pid_t pid);

}  // namespace maniple::launch
