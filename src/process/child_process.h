// A child process whose output is read line by line; it does not outlive its owner.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "process/start.h"
#include <maniple/comm/deadline.h>

namespace maniple::launch {

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
