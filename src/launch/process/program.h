// What to execute: finds the program as a shell would, before anything is started, so that a mistake costs one line and
// the conventional exit code.
#pragma once

#include <string>
#include <vector>

#include <maniple/comm/error.h>

namespace maniple::launch {

inline constexpr int kNotExecutable = 126;
inline constexpr int kNotFound = 127;

/// The launcher's exit code travels with the text.
struct ProgramError : InvalidArgument {
  ProgramError(const std::string& text, int code) : InvalidArgument(text), exit_code(code) {}
  int exit_code;
};

struct Program {
  std::string path;               ///< for execve
  std::vector<std::string> argv;  ///< argv[0] as the user wrote it
};

/// `command` is what the user wrote. A script NAME.py that is not executable is run by python3. `search_path` is PATH;
/// relative names are looked up from the present directory.
Program find_program(const std::vector<std::string>& command, const std::string& search_path);

/// Whether a file that the kernel cannot execute is for the shell: it is text. An empty one, or one with zero bytes, is
/// a program that is damaged or was built for another machine.
bool is_for_shell(const std::string& path);

/// Why execve(2) refused `path`.
std::string exec_error_text(const std::string& path, int code);

}  // namespace maniple::launch
