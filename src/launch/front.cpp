#include "launch/front.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>

#include <fmt/format.h>

#include "base/system_error.h"
#include "launch/descendants.h"
#include "launch/failure_report.h"

namespace maniple::launch {
namespace {

constexpr int kPassedOn[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGCONT, SIGUSR1, SIGUSR2};

/// Signals that were ignored when we came (nohup, a shell's background job) stay ignored.
sigset_t signals_to_take() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGCHLD);
  for (const int signal : kPassedOn) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) ::sigaddset(&set, signal);
  }
  return set;
}

void pass_on(int control, int signal) {
  const auto byte = static_cast<unsigned char>(signal == SIGTSTP ? SIGSTOP : signal);
  while (::send(control, &byte, 1, MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

int code_of(pid_t agent, int status) {
  constexpr int kLimit_ms = 3000;
  end_descendants(kLimit_ms);  // none, unless the agent was killed
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  const int signal = WTERMSIG(status);
  fmt::print(stderr, "maniple: the launcher's agent (pid {}) was ended by {}; all workers were ended\n", agent,
             signal_name(signal));
  return 128 + signal;
}

int stay_in_front(pid_t agent, int control, const sigset_t& signals) {
  for (;;) {
    siginfo_t info{};
    const int signal = ::sigwaitinfo(&signals, &info);
    if (signal < 0) continue;
    if (signal == SIGCHLD) {
      int status = 0;
      pid_t pid = 0;
      while ((pid = ::waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid == agent) return code_of(agent, status);
      }
      continue;
    }
    pass_on(control, signal);
    if (signal == SIGTSTP) ::raise(SIGSTOP);  // SIGCONT is passed on when it comes
  }
}

}  // namespace

int run_behind_front(const std::function<int(UniqueFd)>& agent) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw_system_error("socketpair");
  UniqueFd here(ends[0]);
  UniqueFd there(ends[1]);
  const sigset_t signals = signals_to_take();
  sigset_t before;
  ::sigprocmask(SIG_BLOCK, &signals, &before);
  adopt_orphans();
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) throw_system_error("fork");
  if (pid == 0) {
    here.reset();
    ::setsid();
    adopt_orphans();
    int code = 1;
    try {
      code = agent(std::move(there));
    } catch (const InvalidArgument& error) {
      fmt::print(stderr, "maniple: {}\n", error.what());
      code = 2;
    } catch (const std::exception& error) {
      fmt::print(stderr, "maniple: {}\n", error.what());
    }
    std::fflush(nullptr);
    ::_exit(code);
  }
  there.reset();
  const int code = stay_in_front(pid, here.get(), signals);
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
  return code;
}

}  // namespace maniple::launch
