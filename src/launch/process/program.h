// Finds the program to execute as a shell would. This happens before anything is started, so that a mistyped name
// yields a one-line error and the conventional exit code.
#pragma once

#include <string>
#include <vector>

#include <maniple/comm/error.h>

namespace maniple::launch {

inline constexpr int kNotExecutable = 126;
inline constexpr int kNotFound = 127;

/// An error that carries the launcher's exit code.
struct ProgramError : InvalidArgument {
  ProgramError(const std::string& text, int code) : InvalidArgument(text), exit_code(code) {}
  int exit_code;
};

struct Program {
  std::string path;               ///< for execve
  std::vector<std::string> argv;  ///< argv[0] as the user wrote it
};

/// `command` is as the user wrote it. A script NAME.py that is not executable is run by python3. `search_path` is PATH;
/// relative names are resolved against the current directory.
Program find_program(const std::vector<std::string>& command, const std::string& search_path);

/// Whether a file that the kernel cannot execute is text, and so meant for the shell. A file that is empty or contains
/// zero bytes is a program that is damaged or was built for another machine.
bool is_for_shell(const std::string& path);

/// Why execve(2) refused `path`.
std::string exec_error_text(const std::string& path, int code);

}  // namespace maniple::launch
