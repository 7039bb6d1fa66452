// Starting one process: the one way for workers, remote shells, spawned functions and other programs.
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
  /// Standard output is a pseudo-terminal, standard error a pipe: the C library then writes each line as it is printed,
  /// where it would keep some KiB for a pipe and lose them when the program aborts. Bytes pass unchanged (no echo, no
  /// CR LF); it is nobody's controlling terminal. A pipe all the same where there are no pseudo-terminals to be had.
  terminal,
  inherited,  ///< those of this process
};

struct StartOptions {
  const Program* program = nullptr;
  const Environment* environment = nullptr;
  std::string name = {};    ///< for messages: "process 3 of 8"; empty: the program's path
  std::string folder = {};  ///< where it starts; empty: here
  int input = -1;           ///< its standard input; -1: nothing to read
  StartOutput output = StartOutput::pipes;
  std::vector<int> inherited = {};  ///< more descriptors that it gets, under the same numbers; negative ones are none
  const std::vector<int>* cpus = nullptr;  ///< null or empty: any
  /// It leads a session of its own, all signals have their default actions, and the kernel sends it `death_signal` when
  /// the *thread* that starts it ends. False: it stays in this process group, ignores what this process ignores, and
  /// outlives it.
  bool own_session = true;
  int death_signal = SIGKILL;
  bool new_network = false;  ///< starts in a network namespace of its own
  int network = -1;          ///< starts in the network namespace of this descriptor (/proc/PID/ns/net)
};

struct StartedProcess {
  pid_t pid = -1;
  UniqueFd out;  ///< non-blocking, close-on-exec; so is `err`. None if they are inherited.
  UniqueFd err;
};

/// Throws SystemError naming the program, ProgramError when it cannot be executed.
StartedProcess start_process(const StartOptions& options);

/// Raises the soft limit of descriptors for the pipes of `count` processes; those get the original limit back.
void make_room_for_pipes(int count);

/// A child process whose output is read line by line; it does not outlive its owner.
class ChildProcess {
 public:
  /// The first word of the command is looked for on PATH. Throws as start_process does.
  explicit ChildProcess(const std::vector<std::string>& command);
  /// Its outputs must not be inherited.
  explicit ChildProcess(const StartOptions& options, std::chrono::milliseconds grace = std::chrono::seconds(2));
  ~ChildProcess();  ///< SIGTERM, after the grace time SIGKILL
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  /// The next line of its standard output; nullopt at the end of it or of the time.
  std::optional<std::string> next_line(Deadline deadline);
  /// The last line that it has written to standard error, after its output has ended.
  std::string last_error_line();
  pid_t pid() const noexcept { return process_.pid; }
  /// There will be no more lines.
  bool has_ended() const noexcept { return ended_; }

 private:
  StartedProcess process_;
  std::chrono::milliseconds grace_{2000};
  std::string buffer_;
  bool ended_ = false;
};

}  // namespace maniple::launch
