#include "bench/child.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>

#include "base/system_error.h"

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

/// The child's side between fork and exec. We have one thread, so allocation is allowed here.
class Starter {
 public:
  Starter(const ChildSpec& spec, pid_t parent, int failure_fd)
      : spec_(spec), parent_(parent), failure_fd_(failure_fd) {}

  [[noreturn]] void run(int out, int err) {
    require(prctl(PR_SET_PDEATHSIG, spec_.death_signal) == 0, "prctl");
    if (getppid() != parent_) _exit(1);  // it died before prctl could tell the kernel
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
    if (spec_.new_network) require(unshare(CLONE_NEWNET) == 0, "unshare of the network");
    if (!spec_.network_of) return;
    const std::string path = fmt::format("/proc/{}/ns/net", *spec_.network_of);
    const UniqueFd network(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    require(network && setns(network.get(), CLONE_NEWNET) == 0, "setns to the network");
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

}  // namespace

Child::Child(const ChildSpec& spec) : name_(spec.name), patience_ms_(spec.death_signal == SIGKILL ? 1000 : 5000) {
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
      patience_ms_(other.patience_ms_) {}

Child::~Child() {
  if (pid_ < 0) return;
  kill(pid_, SIGTERM);
  if (!ended_within(end_.get(), patience_ms_)) kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

std::string Child::reap() {
  int status = 0;
  waitpid(std::exchange(pid_, -1), &status, 0);
  if (WIFSIGNALED(status)) return fmt::format("signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)));
  return WEXITSTATUS(status) == 0 ? "" : fmt::format("exit code {}", WEXITSTATUS(status));
}

}  // namespace maniple::bench
