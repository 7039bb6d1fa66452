// When a process began: with its number, that names it for good, also after the number has been given away again.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace maniple::launch {

/// Field 22 of a line of /proc/PID/stat; the name in it may hold blanks and parentheses.
std::optional<std::uint64_t> start_in_stat(std::string_view line);

/// Clock ticks after boot; nullopt when there is no such process, or only what is left of one (a zombie).
std::optional<std::uint64_t> start_of_process(pid_t pid);

/// "pid:[4026531836]": numbers of processes mean something only inside one of these.
std::string own_pid_space();

}  // namespace maniple::launch
