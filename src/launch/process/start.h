// Starts one process. Workers, remote shells, spawned functions and other programs are all started here.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <optional>
#include <string>
#include <vector>

#include "comm/base/unique_fd.h"
#include "launch/process/program.h"
#include "launch/process/rank_environment.h"
#include <maniple/comm/deadline.h>

namespace maniple::launch {

enum class StartOutput {
  pipes,  ///< standard output and error are pipes
  /// Standard output is a pseudo-terminal, standard error a pipe. The C library then writes each line as it is printed;
  /// for a pipe it would buffer some KiB and lose them when the program aborts. Bytes pass unchanged (no echo, no CR
  /// LF), and the terminal controls no session. Falls back to a pipe if no pseudo-terminal is available.
  terminal,
  inherited,  ///< the outputs of this process
};

struct StartOptions {
  const Program* program = nullptr;
  const Environment* environment = nullptr;
  std::string name = {};    ///< for messages: "process 3 of 8"; empty: the program's path
  std::string folder = {};  ///< where it starts; empty: here
  int input = -1;           ///< its standard input; -1: nothing to read
  StartOutput output = StartOutput::pipes;
  std::vector<int> inherited = {};  ///< more descriptors to pass on under the same numbers; negative ones are skipped
  const std::vector<int>* cpus = nullptr;  ///< null or empty: any
  /// True: the process leads a session of its own, all its signals have their default actions, and the kernel sends it
  /// `death_signal` when the *thread* that started it ends. False: it stays in this process group, ignores the signals
  /// that this process ignores, and outlives this process.
  bool own_session = true;
  int death_signal = SIGKILL;
  bool new_network = false;  ///< starts in a network namespace of its own
  int network = -1;          ///< starts in the network namespace that this descriptor (/proc/PID/ns/net) refers to
};

struct StartedProcess {
  pid_t pid = -1;
  UniqueFd out;  ///< non-blocking and close-on-exec, like `err`; both empty if the outputs are inherited
  UniqueFd err;
};

/// Throws SystemError naming the program, ProgramError when it cannot be executed.
StartedProcess start_process(const StartOptions& options);

/// Raises the soft descriptor limit for the pipes of `count` processes. Started processes get the original limit.
void make_room_for_pipes(int count);

/// A child process whose output is read line by line. The destructor ends the child.
class ChildProcess {
 public:
  /// The first word of the command is searched on PATH. Throws like start_process.
  explicit ChildProcess(const std::vector<std::string>& command);
  /// `options.output` must not be `inherited`.
  explicit ChildProcess(const StartOptions& options, std::chrono::milliseconds grace = std::chrono::seconds(2));
  ~ChildProcess();  ///< sends SIGTERM, and SIGKILL after the grace time
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  /// The next line of its standard output; nullopt at end of output or when the deadline passes.
  std::optional<std::string> next_line(Deadline deadline);
  /// The last line it wrote to standard error. Call after its output has ended.
  std::string last_error_line();
  pid_t pid() const noexcept { return process_.pid; }
  /// No more lines will follow.
  bool has_ended() const noexcept { return ended_; }

 private:
  StartedProcess process_;
  std::chrono::milliseconds grace_{2000};
  std::string buffer_;
  bool ended_ = false;
};

}  // namespace maniple::launch
