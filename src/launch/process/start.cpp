// The child is created by vfork, which copies no page tables, so a start costs the same however large the launcher is.
// Between vfork and execve the child runs in the parent's memory: it only makes system calls and reads the Recipe.
#include "launch/process/start.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/system_error.h"
#include "launch/process/descriptors.h"
#include "launch/process/process_table.h"

namespace maniple::launch {
namespace {

rlimit original_limit{};
bool limit_raised = false;

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

Pipe make_output_pipe() {
  auto [read, write] = make_pipe();
  ::fcntl(read.get(), F_SETFL, O_NONBLOCK);
  return {std::move(read), std::move(write)};
}

/// Empty if no pseudo-terminal is available.
Pipe make_terminal() {
  UniqueFd read(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK));
  if (!read || ::unlockpt(read.get()) != 0) return {};
  UniqueFd write(::ioctl(read.get(), TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC));
  termios mode{};
  if (!write || ::tcgetattr(write.get(), &mode) != 0) return {};
  ::cfmakeraw(&mode);
  if (::tcsetattr(write.get(), TCSANOW, &mode) != 0) return {};
  return {above_standard(std::move(read)), above_standard(std::move(write))};
}

/// Everything the child needs, prepared by the parent.
struct Recipe {
  const char* path;
  char* const* argv;
  char* const* shell_argv;
  char* const* envp;
  const char* folder;
  int input;
  int out;  // -1: as here
  int err;
  const int* inherited;
  std::size_t inherited_count;
  const cpu_set_t* cpus;
  std::size_t cpu_bytes;
  pid_t parent;
  const rlimit* limit;
  bool own_session;
  int death_signal;
  bool new_network;
  int network;
};

/// The child's error, in memory that it shares with the parent.
struct Failure {
  int code = 0;  // errno; 0: no error
  bool in_exec = false;
};

[[noreturn]] void become(const Recipe& recipe, volatile Failure* failure) {
  if (recipe.own_session) {
    ::setsid();
    ::prctl(PR_SET_PDEATHSIG, recipe.death_signal);
    if (::getppid() != recipe.parent) ::_exit(127);  // the parent died before the line above
  }
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action{};
    const bool ignored = ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
    if (ignored && !recipe.own_session && signal != SIGTERM) continue;
    action = {};
    action.sa_handler = SIG_DFL;
    ::sigaction(signal, &action, nullptr);
  }
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  if (recipe.limit != nullptr) ::setrlimit(RLIMIT_NOFILE, recipe.limit);
  if (recipe.cpus != nullptr) ::sched_setaffinity(0, recipe.cpu_bytes, recipe.cpus);
  bool fine = !recipe.new_network || ::unshare(CLONE_NEWNET) == 0;
  fine = fine && (recipe.network < 0 || ::setns(recipe.network, CLONE_NEWNET) == 0);
  fine = fine && ::dup2(recipe.input, 0) == 0;
  if (recipe.out >= 0) fine = fine && ::dup2(recipe.out, 1) == 1 && ::dup2(recipe.err, 2) == 2;
  for (std::size_t i = 0; fine && i < recipe.inherited_count; ++i) {
    fine = recipe.inherited[i] < 0 || ::fcntl(recipe.inherited[i], F_SETFD, 0) == 0;
  }
  if (fine && recipe.folder != nullptr) fine = ::chdir(recipe.folder) == 0;
  if (fine) {
    ::execve(recipe.path, recipe.argv, recipe.envp);
    // The shell runs a script without a #! line, as with execvp.
    if (errno == ENOEXEC && recipe.shell_argv != nullptr) ::execve("/bin/sh", recipe.shell_argv, recipe.envp);
    failure->in_exec = true;
  }
  failure->code = errno;
  ::_exit(127);
}

/// Signals are blocked meanwhile: a handler must not run in the child, which shares this process's memory.
[[gnu::noinline]] pid_t vfork_and_become(const Recipe& recipe, volatile Failure* failure) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  const pid_t pid = ::vfork();
  if (pid == 0) become(recipe, failure);
  const int code = errno;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  errno = code;
  return pid;
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> list;
  list.reserve(strings.size() + 1);
  for (const std::string& text : strings) list.push_back(const_cast<char*>(text.c_str()));  // execve does not write
  list.push_back(nullptr);
  return list;
}

}  // namespace

StartedProcess start_process(const StartOptions& options) {
  Pipe out, err;
  if (options.output == StartOutput::terminal) out = make_terminal();
  if (options.output != StartOutput::inherited) {
    if (!out.write) out = make_output_pipe();
    err = make_output_pipe();
  }
  UniqueFd input;  // dup2 onto 0 must not run over a descriptor that is still needed
  if (options.input < 0) {
    input = above_standard(UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)));
  } else if (options.input != STDIN_FILENO) {
    input.reset(::fcntl(options.input, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  }

  std::vector<cpu_set_t> cpus;
  if (options.cpus != nullptr && !options.cpus->empty()) {
    const auto highest = static_cast<std::size_t>(options.cpus->back());
    cpus.resize(highest / CPU_SETSIZE + 1);
    for (const int cpu : *options.cpus)
      CPU_SET_S(static_cast<std::size_t>(cpu), cpus.size() * sizeof(cpu_set_t), cpus.data());
  }
  const std::vector<char*> argv = pointers(options.program->argv);
  std::vector<char*> shell_argv = argv;
  const std::string shell = "/bin/sh";
  shell_argv.front() = const_cast<char*>(shell.c_str());
  shell_argv.insert(shell_argv.begin() + 1, const_cast<char*>(options.program->path.c_str()));
  const std::vector<char*> envp = pointers(*options.environment);

  const Recipe recipe{.path = options.program->path.c_str(),
                      .argv = argv.data(),
                      .shell_argv = is_for_shell(options.program->path) ? shell_argv.data() : nullptr,
                      .envp = envp.data(),
                      .folder = options.folder.empty() ? nullptr : options.folder.c_str(),
                      .input = input ? input.get() : STDIN_FILENO,
                      .out = out.write.get(),
                      .err = err.write.get(),
                      .inherited = options.inherited.data(),
                      .inherited_count = options.inherited.size(),
                      .cpus = cpus.empty() ? nullptr : cpus.data(),
                      .cpu_bytes = cpus.size() * sizeof(cpu_set_t),
                      .parent = ::getpid(),
                      .limit = limit_raised ? &original_limit : nullptr,
                      .own_session = options.own_session,
                      .death_signal = options.death_signal,
                      .new_network = options.new_network,
                      .network = options.network};
  volatile Failure failure;
  const pid_t pid = vfork_and_become(recipe, &failure);
  const int vfork_code = errno;
  const std::string& path = options.program->path;
  const std::string& name = options.name.empty() ? path : options.name;
  if (pid < 0) throw SystemError(fmt::format("starting {}: {}", name, start_error_text(vfork_code)), vfork_code);
  if (failure.code != 0) {
    const int code = failure.code;
    while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    const std::string where = options.folder.empty() ? "" : fmt::format(" in {}", options.folder);
    const std::string what = fmt::format("starting {}{}", name, where);
    if (!failure.in_exec) throw_system_error(what, code);
    const std::string text = fmt::format("{}: {}", what, exec_error_text(path, code));
    if (code == EAGAIN || code == ENOMEM) throw SystemError(text, code);
    throw ProgramError(text, kNotExecutable);
  }
  return {.pid = pid, .out = std::move(out.read), .err = std::move(err.read)};
}

void make_room_for_pipes(int count) {
  constexpr rlim_t kOwn = 64;
  const rlim_t needed = kOwn + 4 * static_cast<rlim_t>(count);
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  if (!limit_raised) original_limit = limit;
  limit.rlim_cur = std::min(needed, limit.rlim_max);
  MANIPLE_REQUIRE(limit.rlim_cur >= kOwn + 3 * static_cast<rlim_t>(count),
                  "{} workers need {} descriptors, but the limit is {} (ulimit -Hn); start fewer or raise it", count,
                  needed, limit.rlim_max);
  limit_raised = ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

namespace {

constexpr std::size_t kMostBytes = 64 * 1024;
constexpr std::chrono::seconds kErrorTimeout{2};

}  // namespace

ChildProcess::ChildProcess(const std::vector<std::string>& command) {
  const char* path = std::getenv("PATH");
  const Program program = find_program(command, path != nullptr ? path : "/usr/bin:/bin");
  const Environment environment = own_environment();
  process_ = start_process({.program = &program, .environment = &environment});
}

ChildProcess::ChildProcess(const StartOptions& options, std::chrono::milliseconds grace)
    : process_(start_process(options)), grace_(grace) {}

ChildProcess::~ChildProcess() {
  process_.out.reset();
  end_child(process_.pid, grace_);
}

std::optional<std::string> ChildProcess::next_line(Deadline deadline) {
  for (;;) {
    const auto end = buffer_.find('\n');
    if (end != std::string::npos) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    if (buffer_.size() > kMostBytes) return std::nullopt;
    pollfd state{process_.out.get(), POLLIN, 0};
    const int ready = ::poll(&state, 1, deadline.poll_ms());
    if (ready <= 0 && deadline.expired()) return std::nullopt;
    if (ready <= 0) continue;
    char bytes[1024];
    const ssize_t got = ::read(process_.out.get(), bytes, sizeof bytes);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got <= 0) {
      ended_ = true;
      return std::nullopt;
    }
    buffer_.append(bytes, static_cast<std::size_t>(got));
  }
}

std::string ChildProcess::last_error_line() {
  std::string text;
  char bytes[1024];
  // Wait for end-of-file after the output has ended: standard error may end a little later.
  const Deadline deadline = Deadline::after(ended_ ? kErrorTimeout : std::chrono::seconds(0));
  while (text.size() < kMostBytes) {
    const ssize_t got = ::read(process_.err.get(), bytes, sizeof bytes);
    if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) break;
    if (got > 0) {
      text.append(bytes, static_cast<std::size_t>(got));
      continue;
    }
    pollfd state{process_.err.get(), POLLIN, 0};
    if (deadline.expired()) break;
    ::poll(&state, 1, deadline.poll_ms());
  }
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  const auto last = text.rfind('\n');
  if (last != std::string::npos) text.erase(0, last + 1);
  return text;
}

}  // namespace maniple::launch
