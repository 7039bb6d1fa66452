// The agent: the launcher process that is the parent of the workers (see supervisor.h).
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>

#include "comm/base/unique_fd.h"
#include "comm/net/poller.h"
#include "launch/output/console.h"

namespace maniple::launch {

class AgentProcess {
 public:
  struct Events {
    std::function<void(int signal)> interrupted;                       ///< SIGINT, SIGTERM, SIGHUP, SIGQUIT
    std::function<void(int signal)> passed_on;                         ///< SIGSTOP, SIGCONT, SIGUSR1, SIGUSR2
    std::function<void(pid_t pid, int code, int status)> child_ended;  ///< called before the child is reaped
    std::function<void()> children_reaped;
    std::function<void()> output_closed;  ///< the reader of standard output is gone
    std::function<bool()> drained;        ///< returns whether the process may end now (called after stop)
  };

  /// `control` is the agent's end of the socket to the supervisor.
  AgentProcess(UniqueFd control, const ConsoleOptions& console);

  Poller& poller() noexcept { return poller_; }
  Console& console() noexcept { return console_; }
  int control() const noexcept { return control_.get(); }

  /// Ends run() once everything is written. Only the first call counts.
  void stop(int code);
  bool stopped() const noexcept { return result_.has_value(); }

  /// Runs until stop(). When the supervisor is gone, kills all descendants and ends this process.
  int run(Events events);

 private:
  void on_control();
  void on_signal();
  void reap();
  void take_signal(int signal);

  UniqueFd control_;
  UniqueFd signals_;
  Poller poller_;
  Console console_;
  Events events_;
  std::optional<int> result_;
  int interrupts_after_stop_ = 0;
  bool had_output_;
};

}  // namespace maniple::launch
