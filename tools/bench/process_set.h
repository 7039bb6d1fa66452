// Child processes that work together: either all exit cleanly, or all are ended.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/base/unique_fd.h"
#include <maniple/comm/deadline.h>
#include <maniple/comm/error.h>

namespace maniple::bench {

/// Thrown when a signal of a SignalWatch has arrived. Not an Error, because nothing failed.
struct Interrupted {
  int signal;
};

/// SIGINT, SIGTERM and SIGHUP as a readable descriptor, so that destructors end and remove everything as usual. Blocks
/// these signals in the process while it exists. Create it before any thread.
class SignalWatch {
 public:
  SignalWatch();
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  int fd() const noexcept { return fd_.get(); }
  void throw_if_signalled() const;  ///< throws Interrupted

 private:
  sigset_t before_;
  UniqueFd fd_;
};

struct ChildSpec {
  std::string name;               ///< for messages: "native rank 1"
  std::vector<std::string> argv;  ///< argv[0] is searched in PATH unless it contains a slash
  std::vector<std::pair<std::string, std::string>> environment;  ///< added to this process's environment
  int death_signal = SIGKILL;  ///< sent by the kernel when this process dies; SIGTERM for a child that must end others
  std::optional<int> core;     ///< the core to bind the child to
  std::optional<int> network;  ///< starts in the network namespace of this descriptor
};

/// A child process that cannot outlive this process, with its output in pipes.
class Child {
 public:
  /// Returns once the program has been executed; throws SystemError naming what failed.
  explicit Child(const ChildSpec& spec);
  ~Child();  ///< sends SIGTERM, then SIGKILL after 1 s (5 s if the child must end others first), and reaps the child
  Child(Child&& other) noexcept;
  Child& operator=(Child&&) = delete;

  const std::string& name() const noexcept { return name_; }
  pid_t pid() const noexcept { return pid_; }
  int out() const noexcept { return out_.get(); }
  int err() const noexcept { return err_.get(); }
  int end() const noexcept { return end_.get(); }  ///< readable when the process has ended

  /// After end() has become readable: empty for a clean exit, otherwise "exit code 3" or "signal 9 (Killed)".
  std::string reap();

 private:
  std::string name_;
  pid_t pid_ = -1;
  UniqueFd out_, err_, end_;
  int grace_ms_ = 1000;
};

/// A child failed or did not finish in time. The text names the child and quotes its last lines of standard error.
struct ProcessSetFailed : Error {
  explicit ProcessSetFailed(const std::string& text) : Error(ErrorKind::peer_lost, text) {}
};

using LineSink = std::function<void(std::string_view line)>;

/// Starts all children, passes each complete line of standard output to `on_line`, and returns when all have exited
/// with code 0. Throws ProcessSetFailed or Interrupted; no child is left then.
void run_process_set(const std::vector<ChildSpec>& specs, const LineSink& on_line, Deadline deadline,
                     const SignalWatch& watch);

/// Runs one program to its end and throws ProcessSetFailed unless it succeeds.
void run_tool(ChildSpec spec, const SignalWatch& watch);

}  // namespace maniple::bench
