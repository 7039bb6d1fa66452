#include "launch/workers/supervisor.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>

#include <fmt/format.h>

#include "base/files.h"
#include "base/system_error.h"
#include "process/descendants.h"
#include "process/failure_report.h"

namespace maniple::launch {
namespace {

constexpr int kPassedOn[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGCONT, SIGUSR1, SIGUSR2};
pid_t front = 0;

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

int stay_in_front(pid_t keeper, int control, const sigset_t& signals) {
  for (;;) {
    siginfo_t info{};
    const int signal = ::sigwaitinfo(&signals, &info);
    if (signal < 0) continue;
    if (signal == SIGCHLD) {
      int status = 0;
      pid_t pid = 0;
      while ((pid = ::waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid == keeper) return code_of(keeper, status);
      }
      continue;
    }
    pass_on(control, signal);
    if (signal == SIGTSTP) ::raise(SIGSTOP);  // SIGCONT is passed on when it comes
  }
}

/// A child that leads a session of its own and adopts orphans.
pid_t fork_leader() {
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  const int code = errno;
  if (pid < 0) throw SystemError(fmt::format("starting the launcher's agent: {}", start_error_text(code)), code);
  if (pid == 0) {
    ::setsid();
    adopt_orphans();
  }
  return pid;
}

[[noreturn]] void be_agent(const std::function<int(UniqueFd)>& agent, UniqueFd control) {
  int code = 1;
  try {
    code = agent(std::move(control));
  } catch (const InvalidArgument& error) {
    fmt::print(stderr, "maniple: {}\n", error.what());
    code = 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "maniple: {}\n", error.what());
  }
  std::fflush(nullptr);
  ::_exit(code);
}

/// Another name and another command line than the launcher's: `pkill -KILL maniple` is for the launcher.
void rename_keeper() {
  ::prctl(PR_SET_NAME, "rank-keeper");
  const std::string stat = file_text("/proc/self/stat");
  std::istringstream fields(stat.substr(std::min(stat.rfind(')'), stat.size() - 1) + 1));
  constexpr int kFieldsBefore = 45;  // from the third field, the state, to arg_start, the 48th
  std::string skipped;
  for (int i = 0; i < kFieldsBefore; ++i) fields >> skipped;
  std::uintptr_t begin = 0, end = 0;
  if (!(fields >> begin >> end) || begin == 0 || end <= begin) return;
  const std::string line = fmt::format("rank-keeper: ends the ranks when their launcher, pid {}, is killed", front);
  auto* place = reinterpret_cast<char*>(begin);
  std::memset(place, 0, end - begin);
  std::memcpy(place, line.data(), std::min(line.size(), end - begin - 1));
}

[[noreturn]] void keep(const std::function<int(UniqueFd)>& agent, UniqueFd control) {
  int code = 1;
  try {
    const pid_t pid = fork_leader();
    if (pid == 0) be_agent(agent, std::move(control));
    control.reset();
    sigset_t all;
    ::sigfillset(&all);
    ::sigprocmask(SIG_SETMASK, &all, nullptr);  // signals are for the process in front
    rename_keeper();
    int status = 0;
    for (pid_t ended = 0; ended != pid && (ended >= 0 || errno != ECHILD);) ended = ::waitpid(-1, &status, 0);
    code = code_of(pid, status);
  } catch (const std::exception& error) {
    fmt::print(stderr, "maniple: {}\n", error.what());
  }
  std::fflush(nullptr);
  ::_exit(code);
}

}  // namespace

pid_t supervisor_pid() noexcept { return front != 0 ? front : ::getppid(); }

int run_supervised(const std::function<int(UniqueFd)>& agent) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw_system_error("socketpair");
  UniqueFd here(ends[0]);
  UniqueFd there(ends[1]);
  const sigset_t signals = signals_to_take();
  sigset_t before;
  ::sigprocmask(SIG_BLOCK, &signals, &before);
  front = ::getpid();
  ::signal(SIGCHLD, SIG_DFL);  // ignored, it would leave nothing to wait for
  adopt_orphans();
  const pid_t pid = fork_leader();
  if (pid == 0) {
    here.reset();
    keep(agent, std::move(there));
  }
  there.reset();
  const int code = stay_in_front(pid, here.get(), signals);
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
  return code;
}

}  // namespace maniple::launch
