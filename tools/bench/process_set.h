// Child processes that do one thing together: all run to a clean end, or all are ended.
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

/// Thrown when one of the signals of a SignalWatch has arrived; not an Error, because nothing went wrong.
struct Interrupted {
  int signal;
};

/// SIGINT, SIGTERM and SIGHUP as a readable descriptor, so that everything that was started is ended and removed in the
/// ordinary way, by destructors. Blocks them for the process while it lives. Make it before any thread.
class SignalWatch {
 public:
  SignalWatch();
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  int fd() const noexcept { return fd_.get(); }
  void throw_if_signalled() const;  ///< Interrupted

 private:
  sigset_t before_;
  UniqueFd fd_;
};

/// What to start.
struct ChildSpec {
  std::string name;               ///< for messages: "native rank 1"
  std::vector<std::string> argv;  ///< argv[0] is searched in PATH unless it holds a slash
  std::vector<std::pair<std::string, std::string>> environment;  ///< added to ours
  int death_signal = SIGKILL;  ///< sent by the kernel when we die, however we die; TERM for one that has to end others
  std::optional<int> core;     ///< bound to it
  std::optional<int> network;  ///< starts in the network namespace of this descriptor
};

/// A child process that cannot outlive us, with its output in pipes.
class Child {
 public:
  /// Returns once the program has been executed; throws SystemError saying what failed.
  explicit Child(const ChildSpec& spec);
  ~Child();  ///< ends it (TERM, then KILL: after a second, or after five if it has to end others first) and reaps it
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

/// A child failed or did not finish in time; the text names it and holds the last lines of its standard error.
struct ProcessSetFailed : Error {
  explicit ProcessSetFailed(const std::string& text) : Error(ErrorKind::peer_lost, text) {}
};

using LineSink = std::function<void(std::string_view line)>;

/// Starts them all, hands each complete line of standard output to `on_line`, and returns when all have exited with
/// code 0. Throws ProcessSetFailed, or Interrupted; either way no child is left.
void run_process_set(const std::vector<ChildSpec>& specs, const LineSink& on_line, Deadline deadline,
                     const SignalWatch& watch);

/// Runs one program to its end and throws ProcessSetFailed unless it succeeds.
void run_tool(ChildSpec spec, const SignalWatch& watch);

}  // namespace maniple::bench
