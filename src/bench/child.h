// A child process that cannot outlive us, with its output in pipes.
#pragma once

#include <sys/types.h>

#include <csignal>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"

namespace maniple::bench {

struct ChildSpec {
  std::string name;               ///< for messages: "native rank 1"
  std::vector<std::string> argv;  ///< argv[0] is searched in PATH unless it holds a slash
  std::vector<std::pair<std::string, std::string>> environment;  ///< added to ours
  int death_signal = SIGKILL;  ///< sent by the kernel when we die, however we die; TERM for one that has to end others
  bool new_network = false;    ///< starts in a network namespace of its own
  std::optional<int> core;          ///< bound to it
  std::optional<pid_t> network_of;  ///< starts in the network namespace of that process
};

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
  int patience_ms_ = 1000;
};

}  // namespace maniple::bench
