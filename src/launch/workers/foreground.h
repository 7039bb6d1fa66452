// Whether the terminal is the job's or the shell's at the moment.
#pragma once

#include <sys/types.h>

#include <string_view>

namespace maniple::launch {

/// From a line of /proc/PID/stat: its process group has the terminal, or it has no terminal at all. Pure.
bool has_terminal(std::string_view stat_line);

/// The same of the process in front (supervisor.h). The agent cannot ask the terminal: it is not its own. A job that was
/// started with & or stopped by Ctrl-Z does not draw over the shell's prompt, and does not take its input.
bool in_foreground();

}  // namespace maniple::launch
