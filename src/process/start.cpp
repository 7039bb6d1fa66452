// The child is made by vfork: no page tables are copied, so a start costs the same however large the launcher is. Between
// vfork and execve the child runs in the parent's memory: it makes system calls and touches nothing else.
#include "process/start.h"

#include <fcntl.h>
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

#include <fmt/format.h>

#include "base/check.h"
#include "base/system_error.h"

namespace maniple::launch {
namespace {

rlimit original_limit{};
bool limit_raised = false;

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw_system_error("a pipe for a worker");
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

/// Nothing when there is no pseudo-terminal to be had.
Pipe make_terminal() {
  UniqueFd read(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK));
  if (!read || ::unlockpt(read.get()) != 0) return {};
  UniqueFd write(::ioctl(read.get(), TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC));
  termios mode{};
  if (!write || ::tcgetattr(write.get(), &mode) != 0) return {};
  ::cfmakeraw(&mode);
  if (::tcsetattr(write.get(), TCSANOW, &mode) != 0) return {};
  return {std::move(read), std::move(write)};
}

/// Everything the child needs, prepared by the parent.
struct Recipe {
  const char* path;
  char* const* argv;
  char* const* shell_argv;
  char* const* envp;
  const char* folder;
  int input;
  int out;
  int err;
  const int* inherited;
  std::size_t inherited_count;
  const cpu_set_t* cpus;
  std::size_t cpu_bytes;
  pid_t parent;
  const rlimit* limit;
};

/// What went wrong in the child, in memory that it shares with the parent.
struct Failure {
  int code = 0;  // errno; 0: nothing
  bool in_exec = false;
};

[[noreturn]] void become(const Recipe& recipe, volatile Failure* failure) {
  ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != recipe.parent) ::_exit(127);  // it died before the line above
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action {};
    action.sa_handler = SIG_DFL;
    ::sigaction(signal, &action, nullptr);
  }
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  if (recipe.limit != nullptr) ::setrlimit(RLIMIT_NOFILE, recipe.limit);
  if (recipe.cpus != nullptr) ::sched_setaffinity(0, recipe.cpu_bytes, recipe.cpus);
  bool fine = ::dup2(recipe.input, 0) == 0 && ::dup2(recipe.out, 1) == 1 && ::dup2(recipe.err, 2) == 2;
  for (std::size_t i = 0; fine && i < recipe.inherited_count; ++i) {
    fine = recipe.inherited[i] < 0 || ::fcntl(recipe.inherited[i], F_SETFD, 0) == 0;
  }
  if (fine && recipe.folder != nullptr) fine = ::chdir(recipe.folder) == 0;
  if (fine) {
    ::execve(recipe.path, recipe.argv, recipe.envp);
    // A script without a #! line is for the shell, as execvp has it.
    if (errno == ENOEXEC && recipe.shell_argv != nullptr) ::execve("/bin/sh", recipe.shell_argv, recipe.envp);
    failure->in_exec = true;
  }
  failure->code = errno;
  ::_exit(127);
}

[[gnu::noinline]] pid_t vfork_and_become(const Recipe& recipe, volatile Failure* failure) {
  const pid_t pid = ::vfork();
  if (pid == 0) become(recipe, failure);
  return pid;
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> list;
  list.reserve(strings.size() + 1);
  for (const std::string& text : strings) list.push_back(const_cast<char*>(text.c_str()));  // execve does not write
  list.push_back(nullptr);
  return list;
}

/// dup2 onto 0, 1 and 2 must not run over a descriptor that is still needed.
UniqueFd above_standard(UniqueFd fd) {
  if (fd.get() > STDERR_FILENO) return fd;
  UniqueFd moved(::fcntl(fd.get(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  if (!moved) throw_system_error("a descriptor for a worker");
  return moved;
}

}  // namespace

StartedWorker start_worker(const WorkerOrder& order) {
  Pipe out;
  if (order.terminal) out = make_terminal();
  if (!out.write) out = make_pipe();
  Pipe err = make_pipe();
  out.write = above_standard(std::move(out.write));
  err.write = above_standard(std::move(err.write));
  UniqueFd nothing;
  if (order.input < 0) {
    nothing = above_standard(UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)));
  } else if (order.input != STDIN_FILENO) {
    nothing = above_standard(UniqueFd(::fcntl(order.input, F_DUPFD_CLOEXEC, STDERR_FILENO + 1)));
  }

  std::vector<cpu_set_t> cpus;
  if (order.cpus != nullptr && !order.cpus->empty()) {
    const auto highest = static_cast<std::size_t>(order.cpus->back());
    cpus.resize(highest / CPU_SETSIZE + 1);
    for (const int cpu : *order.cpus) CPU_SET_S(static_cast<std::size_t>(cpu), cpus.size() * sizeof(cpu_set_t), cpus.data());
  }
  const std::vector<char*> argv = pointers(order.program->argv);
  std::vector<char*> shell_argv = argv;
  const std::string shell = "/bin/sh";
  shell_argv.front() = const_cast<char*>(shell.c_str());
  shell_argv.insert(shell_argv.begin() + 1, const_cast<char*>(order.program->path.c_str()));
  const std::vector<char*> envp = pointers(*order.environment);

  const Recipe recipe{.path = order.program->path.c_str(),
                      .argv = argv.data(),
                      .shell_argv = is_for_shell(order.program->path) ? shell_argv.data() : nullptr,
                      .envp = envp.data(),
                      .folder = order.folder.empty() ? nullptr : order.folder.c_str(),
                      .input = nothing ? nothing.get() : STDIN_FILENO,
                      .out = out.write.get(),
                      .err = err.write.get(),
                      .inherited = order.inherited.data(),
                      .inherited_count = order.inherited.size(),
                      .cpus = cpus.empty() ? nullptr : cpus.data(),
                      .cpu_bytes = cpus.size() * sizeof(cpu_set_t),
                      .parent = ::getpid(),
                      .limit = limit_raised ? &original_limit : nullptr};
  volatile Failure failure;
  const pid_t pid = vfork_and_become(recipe, &failure);
  const int vfork_code = errno;
  const std::string& path = order.program->path;
  if (pid < 0) throw SystemError(fmt::format("starting {}: {}", path, start_error_text(vfork_code)), vfork_code);
  if (failure.code != 0) {
    const int code = failure.code;
    while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    const std::string where = order.folder.empty() ? "" : fmt::format(" in {}", order.folder);
    const std::string what = fmt::format("starting {}{}", path, where);
    if (!failure.in_exec) throw_system_error(what, code);
    const std::string text = fmt::format("{}: {}", what, exec_error_text(path, code));
    if (code == EAGAIN || code == ENOMEM) throw SystemError(text, code);
    throw ProgramError(text, kNotExecutable);
  }
  return {.pid = pid, .out = std::move(out.read), .err = std::move(err.read)};
}

void make_room_for_workers(int workers) {
  constexpr rlim_t kOwn = 64;
  const rlim_t wanted = kOwn + 4 * static_cast<rlim_t>(workers);
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return;
  if (!limit_raised) original_limit = limit;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  MANIPLE_REQUIRE(limit.rlim_cur >= kOwn + 3 * static_cast<rlim_t>(workers),
                  "{} workers need {} descriptors, but the limit is {} (ulimit -Hn); start fewer or raise it", workers,
                  wanted, limit.rlim_max);
  limit_raised = ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

}  // namespace maniple::launch
