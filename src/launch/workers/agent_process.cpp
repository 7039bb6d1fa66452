#include "launch/workers/agent_process.h"

#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "comm/base/system_error.h"
#include "launch/process/process_table.h"
#include "launch/workers/supervisor.h"

namespace maniple::launch {
namespace {

UniqueFd open_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT}) ::sigaddset(&set, signal);
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  UniqueFd fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) throw_system_error("signalfd");
  return fd;
}

constexpr std::chrono::duration<double> kDrainTimeout{2.0};  // for last messages to other nodes
constexpr std::chrono::milliseconds kEndLimit{1500};

}  // namespace

AgentProcess::AgentProcess(UniqueFd control, const ConsoleOptions& console)
    : control_(std::move(control)),
      signals_(open_signals()),
      console_(poller_, console),
      had_output_(!console_.out().broken()) {
  ::signal(SIGPIPE, SIG_IGN);
}

void AgentProcess::stop(int code) {
  if (!result_) result_ = code;
}

int AgentProcess::run(Events events) {
  events_ = std::move(events);
  poller_.add(control_.get(), EPOLLIN, [this](std::uint32_t) { on_control(); });
  poller_.add(signals_.get(), EPOLLIN, [this](std::uint32_t) { on_signal(); });
  reap();  // children that ended before the signal was watched
  bool reported = false;
  while (!result_) {
    poller_.turn();
    if (had_output_ && !reported && console_.out().broken()) {
      reported = true;
      events_.output_closed();
    }
  }
  console_.finish();
  bool late = false;
  Poller::Timer timer = poller_.call_after(kDrainTimeout, [&] { late = true; });
  while ((!console_.drained() || !(late || events_.drained())) && interrupts_after_stop_ == 0) poller_.turn();
  poller_.cancel(timer);
  poller_.remove(control_.get());
  poller_.remove(signals_.get());
  return *result_;
}

void AgentProcess::on_control() {
  unsigned char bytes[64];
  const ssize_t got = ::read(control_.get(), bytes, sizeof bytes);
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (got <= 0) {
    end_descendants(kEndLimit);
    stop_daemon();
    ::_exit(128 + SIGKILL);
  }
  for (ssize_t i = 0; i < got; ++i) take_signal(bytes[i]);
}

void AgentProcess::take_signal(int signal) {
  if (signal == SIGSTOP || signal == SIGCONT || signal == SIGUSR1 || signal == SIGUSR2)
    return events_.passed_on(signal);
  if (result_) {
    ++interrupts_after_stop_;
    return;
  }
  events_.interrupted(signal);
}

void AgentProcess::on_signal() {
  signalfd_siginfo info{};
  bool children = false;
  while (::read(signals_.get(), &info, sizeof info) == sizeof info) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGCHLD) {
      children = true;
    } else {
      take_signal(signal);
    }
  }
  if (children) reap();
}

void AgentProcess::reap() {
  bool any = false;
  for (;;) {
    siginfo_t info{};
    if (::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) break;
    events_.child_ended(info.si_pid, info.si_code, info.si_status);
    while (::waitpid(info.si_pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    any = true;
  }
  if (any) events_.children_reaped();
}

}  // namespace maniple::launch
