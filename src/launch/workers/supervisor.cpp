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

#include <fmt/format.h>

#include "comm/base/system_error.h"
#include "launch/process/descriptors.h"
#include "launch/process/failure_report.h"
#include "launch/workers/mps_daemon.h"

namespace maniple::launch {
namespace {

constexpr int kPassedOn[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGCONT, SIGUSR1, SIGUSR2};
pid_t supervisor = 0;
MpsDaemon* job_daemon = nullptr;

/// Signals that were ignored at the start (nohup, a shell's background job) stay ignored.
sigset_t signals_to_take() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGCHLD);
  for (const int signal : kPassedOn) {
    struct sigaction action{};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) ::sigaddset(&set, signal);
  }
  return set;
}

void pass_on(int control, int signal) {
  const auto byte = static_cast<unsigned char>(signal == SIGTSTP ? SIGSTOP : signal);
  while (::send(control, &byte, 1, MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

/// Continues a stopped agent or reaper, which could not act on a signal that is passed on.
void continue_stopped() {
  for (const pid_t pid : descendants()) {
    const auto stat = process_stat(pid);
    if (stat && stat->state == 'T') ::kill(pid, SIGCONT);
  }
}

int code_of(pid_t agent, int status) {
  constexpr std::chrono::seconds kLimit{3};
  if (WIFEXITED(status)) stop_daemon();
  end_descendants(kLimit);  // none, unless the agent was killed
  if (job_daemon != nullptr) job_daemon->remove_folder();
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  const int signal = WTERMSIG(status);
  fmt::print(stderr, "maniple: the launcher's agent (pid {}) was ended by {}; all workers were ended\n", agent,
             signal_name(signal));
  return 128 + signal;
}

int supervise(pid_t reaper, int control, const sigset_t& signals) {
  for (;;) {
    siginfo_t info{};
    const int signal = ::sigwaitinfo(&signals, &info);
    if (signal < 0) continue;
    if (signal == SIGCHLD) {
      int status = 0;
      pid_t pid = 0;
      while ((pid = ::waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid == reaper) return code_of(reaper, status);
      }
      continue;
    }
    pass_on(control, signal);
    if (signal != SIGTSTP && signal != SIGUSR1 && signal != SIGUSR2) continue_stopped();
    if (signal == SIGTSTP) ::raise(SIGSTOP);  // SIGCONT is passed on when it arrives
  }
}

/// Forks a child that leads a session of its own and adopts orphans.
pid_t fork_session() {
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

/// Changes the name and command line, so that `pkill -KILL maniple` hits only the launcher.
void rename_reaper() {
  ::prctl(PR_SET_NAME, "rank-reaper");
  const auto stat = process_stat(::getpid());
  if (!stat || stat->arg_begin == 0 || stat->arg_end <= stat->arg_begin) return;
  const std::string line =
      fmt::format("rank-reaper: ends the ranks when their launcher, pid {}, is killed", supervisor);
  auto* begin = reinterpret_cast<char*>(stat->arg_begin);
  const std::size_t size = stat->arg_end - stat->arg_begin;
  std::memset(begin, 0, size);
  std::memcpy(begin, line.data(), std::min(line.size(), size - 1));
}

/// False if the supervisor ended the job or was gone before the daemon was ready; `code` is then the exit code.
bool start_daemon(int control, int& code) {
  if (job_daemon == nullptr) return true;
  try {
    job_daemon->start(control);
    return true;
  } catch (const Aborted&) {
    code = 128 + signal_to_end(control);
    return false;
  }
}

[[noreturn]] void reap(const std::function<int(UniqueFd)>& agent, UniqueFd control) {
  int code = 1;
  try {
    if (!start_daemon(control.get(), code)) ::_exit(code);
    const pid_t pid = fork_session();
    if (pid == 0) be_agent(agent, std::move(control));
    control.reset();
    sigset_t all;
    ::sigfillset(&all);
    ::sigprocmask(SIG_SETMASK, &all, nullptr);  // the supervisor handles signals
    rename_reaper();
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

pid_t supervisor_pid() noexcept { return supervisor != 0 ? supervisor : ::getppid(); }

bool has_terminal(const std::optional<ProcessStat>& stat) {
  return !stat || stat->terminal == 0 || stat->foreground_group == stat->group;
}

bool in_foreground() { return has_terminal(process_stat(supervisor_pid())); }

void stop_daemon() noexcept {
  if (job_daemon != nullptr) job_daemon->stop();
}

int run_supervised(const std::function<int(UniqueFd)>& agent, MpsDaemon* daemon) {
  job_daemon = daemon;
  auto [here, there] = make_socket_pair();
  const sigset_t signals = signals_to_take();
  sigset_t before;
  ::sigprocmask(SIG_BLOCK, &signals, &before);
  supervisor = ::getpid();
  ::signal(SIGCHLD, SIG_DFL);  // if ignored, children would leave no status to wait for
  adopt_orphans();
  const pid_t pid = fork_session();
  if (pid == 0) {
    here.reset();
    reap(agent, std::move(there));
  }
  there.reset();
  const int code = supervise(pid, here.get(), signals);
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
  return code;
}

}  // namespace maniple::launch
