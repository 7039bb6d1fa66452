#include "tools/bench/process_set.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/system_error.h"

namespace maniple::bench {
namespace {

struct Pipe {
  Pipe() {
    std::array<int, 2> ends;
    if (pipe2(ends.data(), O_CLOEXEC) != 0) throw_system_error("pipe2");
    read.reset(ends[0]);
    write.reset(ends[1]);
  }
  UniqueFd read, write;
};

struct StartFailure {
  int code;
  char step[32];
};

/// The child's side between fork and exec. The parent has only one thread, so allocation is allowed here.
class Starter {
 public:
  Starter(const ChildSpec& spec, pid_t parent, int failure_fd)
      : spec_(spec), parent_(parent), failure_fd_(failure_fd) {}

  [[noreturn]] void run(int out, int err) {
    require(prctl(PR_SET_PDEATHSIG, spec_.death_signal) == 0, "prctl");
    if (getppid() != parent_) _exit(1);  // the parent died before prctl
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    enter_network();
    bind();
    const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    require(nothing >= 0 && dup2(nothing, 0) == 0 && dup2(out, 1) == 1 && dup2(err, 2) == 2, "dup2");
    for (const auto& [name, value] : spec_.environment) setenv(name.c_str(), value.c_str(), 1);
    std::vector<char*> argv;
    std::vector<std::string> words = spec_.argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    execvp(argv[0], argv.data());
    require(false, "exec");
    _exit(127);
  }

 private:
  void bind() {
    if (!spec_.core) return;
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(static_cast<std::size_t>(*spec_.core), &cores);
    require(sched_setaffinity(0, sizeof cores, &cores) == 0, "sched_setaffinity");
  }

  void enter_network() {
    if (spec_.network) require(setns(*spec_.network, CLONE_NEWNET) == 0, "setns to the network");
  }

  void require(bool done, const char* step) {
    if (done) return;
    StartFailure failure{errno, {}};
    std::strncpy(failure.step, step, sizeof failure.step - 1);
    if (write(failure_fd_, &failure, sizeof failure) < 0) _exit(126);
    _exit(127);
  }

  const ChildSpec& spec_;
  pid_t parent_;
  int failure_fd_;
};

bool ended_within(int end, int milliseconds) {
  pollfd entry{end, POLLIN, 0};
  return poll(&entry, 1, milliseconds) > 0;
}

constexpr std::size_t kKeptOutput = 4000;  // bytes of standard error kept for a message
constexpr int kShownLines = 10;
constexpr std::size_t kLongestLine = 64 * 1024;

struct Member {
  explicit Member(const ChildSpec& spec) : child(spec) {}
  Child child;
  std::string line;    // the incomplete last line of standard output
  std::string errors;  // the end of standard error
  bool out_open = true, err_open = true, running = true;
};

/// Reads the available bytes; false at the end of the stream.
bool read_some(int fd, std::string& into) {
  std::array<char, 4096> bytes;
  const ssize_t got = read(fd, bytes.data(), bytes.size());
  if (got > 0) into.append(bytes.data(), static_cast<std::size_t>(got));
  return got > 0 || (got < 0 && errno == EINTR);
}

void drain_err(Member& member) {
  member.err_open = read_some(member.child.err(), member.errors);
  if (member.errors.size() > kKeptOutput) member.errors.erase(0, member.errors.size() - kKeptOutput);
}

void drain_out(Member& member, const LineSink& on_line) {
  member.out_open = read_some(member.child.out(), member.line);
  for (std::size_t end; (end = member.line.find('\n')) != std::string::npos; member.line.erase(0, end + 1)) {
    on_line(std::string_view(member.line).substr(0, end));
  }
  if (member.line.size() > kLongestLine) throw ProcessSetFailed(member.child.name() + " printed a line without end");
}

std::string with_errors(std::string text, const Member& member) {
  std::string errors = member.errors;
  while (!errors.empty() && (errors.back() == '\n' || errors.back() == ' ')) errors.pop_back();
  std::size_t start = errors.size();
  for (int lines = 0; lines < kShownLines && start != std::string::npos && start > 0; ++lines) {
    start = errors.rfind('\n', start - 1);
  }
  if (start != std::string::npos && start > 0) errors.erase(0, start + 1);
  return errors.empty() ? text : fmt::format("{}; its standard error ends with:\n{}", text, errors);
}

class ProcessSet {
 public:
  ProcessSet(const std::vector<ChildSpec>& specs, const LineSink& on_line, const SignalWatch& watch)
      : on_line_(on_line), watch_(watch) {
    members_.reserve(specs.size());
    for (const ChildSpec& spec : specs) members_.emplace_back(spec);
  }

  void run(Deadline deadline) {
    while (std::any_of(members_.begin(), members_.end(), [](const Member& m) { return m.running || m.out_open; })) {
      if (deadline.expired()) throw ProcessSetFailed(unfinished());
      wait(deadline);
    }
  }

 private:
  void wait(Deadline deadline) {
    std::vector<pollfd> entries = {{watch_.fd(), POLLIN, 0}};
    std::vector<std::function<void()>> handlers = {[this] { watch_.throw_if_signalled(); }};
    const auto add = [&](int fd, std::function<void()> handler) {
      entries.push_back({fd, POLLIN, 0});
      handlers.push_back(std::move(handler));
    };
    for (Member& member : members_) {
      if (member.out_open) add(member.child.out(), [this, &member] { drain_out(member, on_line_); });
      if (member.err_open) add(member.child.err(), [&member] { drain_err(member); });
      if (member.running) add(member.child.end(), [this, &member] { finish(member); });
    }
    if (poll(entries.data(), entries.size(), deadline.poll_ms()) < 0 && errno != EINTR) throw_system_error("poll");
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (entries[i].revents != 0) handlers[i]();
    }
  }

  void finish(Member& member) {
    member.running = false;
    const std::string outcome = member.child.reap();
    if (outcome.empty()) return;
    drain_rest(member);
    throw ProcessSetFailed(with_errors(fmt::format("{} ended with {}", member.child.name(), outcome), member));
  }

  /// Reads the rest of a failed child's pipe. Only what is available now: a grandchild may hold the pipe open.
  static void drain_rest(Member& member) {
    pollfd entry{member.child.err(), POLLIN, 0};
    while (member.err_open && poll(&entry, 1, 0) > 0) drain_err(member);
  }

  std::string unfinished() const {
    const auto late = std::find_if(members_.begin(), members_.end(), [](const Member& m) { return m.running; });
    if (late == members_.end()) return "a process kept our pipe open after its parent ended";
    return with_errors(late->child.name() + " did not finish in time", *late);
  }

  const LineSink& on_line_;
  const SignalWatch& watch_;
  std::vector<Member> members_;
};

}  // namespace

SignalWatch::SignalWatch() {
  sigset_t watched;
  sigemptyset(&watched);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&watched, signal);
  if (sigprocmask(SIG_BLOCK, &watched, &before_) != 0) throw_system_error("sigprocmask");
  fd_.reset(signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) throw_system_error("signalfd");
}

SignalWatch::~SignalWatch() { sigprocmask(SIG_SETMASK, &before_, nullptr); }

void SignalWatch::throw_if_signalled() const {
  signalfd_siginfo info;
  if (read(fd_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    throw Interrupted{static_cast<int>(info.ssi_signo)};
  }
}

Child::Child(const ChildSpec& spec) : name_(spec.name), grace_ms_(spec.death_signal == SIGKILL ? 1000 : 5000) {
  Pipe out, err, failure;
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ < 0) throw_system_error("fork for " + name_);
  if (pid_ == 0) Starter(spec, parent, failure.write.get()).run(out.write.get(), err.write.get());

  failure.write.reset();
  end_.reset(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  const int end_code = errno;
  StartFailure reason;
  if (read(failure.read.get(), &reason, sizeof reason) == static_cast<ssize_t>(sizeof reason)) {
    waitpid(std::exchange(pid_, -1), nullptr, 0);
    throw_system_error(fmt::format("start {}: {} of {}", name_, reason.step, spec.argv.front()), reason.code);
  }
  if (!end_) {
    kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, -1), nullptr, 0);
    throw_system_error("pidfd_open (Linux 5.3 or later is needed)", end_code);
  }
  out_ = std::move(out.read);
  err_ = std::move(err.read);
}

Child::Child(Child&& other) noexcept
    : name_(std::move(other.name_)),
      pid_(std::exchange(other.pid_, -1)),
      out_(std::move(other.out_)),
      err_(std::move(other.err_)),
      end_(std::move(other.end_)),
      grace_ms_(other.grace_ms_) {}

Child::~Child() {
  if (pid_ < 0) return;
  kill(pid_, SIGTERM);
  if (!ended_within(end_.get(), grace_ms_)) kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

std::string Child::reap() {
  int status = 0;
  waitpid(std::exchange(pid_, -1), &status, 0);
  if (WIFSIGNALED(status)) return fmt::format("signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)));
  return WEXITSTATUS(status) == 0 ? "" : fmt::format("exit code {}", WEXITSTATUS(status));
}

void run_process_set(const std::vector<ChildSpec>& specs, const LineSink& on_line, Deadline deadline,
                     const SignalWatch& watch) {
  ProcessSet(specs, on_line, watch).run(deadline);
}

void run_tool(ChildSpec spec, const SignalWatch& watch) {
  if (spec.name.empty()) spec.name = fmt::format("`{}`", fmt::join(spec.argv, " "));
  run_process_set({std::move(spec)}, [](std::string_view) {}, Deadline::after(std::chrono::seconds(20)), watch);
}

}  // namespace maniple::bench
