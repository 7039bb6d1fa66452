#include <maniple/launch/spawn.h>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>

#include <fmt/format.h>

#include "base/check.h"
#include "base/log.h"
#include "base/system_error.h"
#include "process/descriptors.h"
#include "spawn/spawn_options.h"
#include "spawn/children.h"
#include "spawn/child_environment.h"
#include "spawn/lifeline.h"
#include "spawn/child_main.h"

extern char** environ;

namespace maniple {
namespace {

using namespace launch;

// For the cause of what a process reports to end, too: it unwinds its stack while the others notice already.
constexpr auto kTimeForCause = std::chrono::seconds(1);

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> list;
  for (std::string& text : strings) list.push_back(text.data());
  list.push_back(nullptr);
  return list;
}

// As this process was called, so that `ps` shows it.
std::vector<std::string> own_arguments() {
  std::ifstream in("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string word; std::getline(in, word, '\0');) arguments.push_back(word);
  if (arguments.empty()) arguments.emplace_back("maniple-spawned");
  return arguments;
}

class SpawnActions {
 public:
  SpawnActions() {
    if (::posix_spawn_file_actions_init(&actions_) != 0) throw std::bad_alloc();
    ::posix_spawn_file_actions_addopen(&actions_, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    ::posix_spawnattr_init(&attributes_);
    ::posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    sigset_t signals;
    sigemptyset(&signals);
    ::posix_spawnattr_setsigmask(&attributes_, &signals);
    sigaddset(&signals, SIGTERM);  // by which they are ended
    ::posix_spawnattr_setsigdefault(&attributes_, &signals);
  }
  ~SpawnActions() {
    ::posix_spawn_file_actions_destroy(&actions_);
    ::posix_spawnattr_destroy(&attributes_);
  }
  SpawnActions(const SpawnActions&) = delete;
  SpawnActions& operator=(const SpawnActions&) = delete;

  void keep(int fd) {  // onto itself: clears close-on-exec, in the child only
    if (fd >= 0) ::posix_spawn_file_actions_adddup2(&actions_, fd, fd);
  }
  const posix_spawn_file_actions_t* actions() const { return &actions_; }
  const posix_spawnattr_t* attributes() const { return &attributes_; }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

}  // namespace

struct SpawnContext::Impl {
  explicit Impl(const SpawnOptions& wanted) : options(wanted) {}
  ~Impl() {
    // A child of fork() has a copy of the handle, but they are not its children.
    if (::getpid() != owner) return;
    watch.end_all(options.grace);
  }

  void start(detail::SpawnEntry entry, void (*function)(), const std::string& arguments) {
    const bool by_fork = options.start_method == StartMethod::fork;
    if (by_fork) check_fork_is_safe();
    if (!by_fork && !takeover_is_possible())
      throw Unsupported(
          "spawn: start method reexec needs a dynamically linked program; link without -static, or use "
          "StartMethod::fork");
    UniqueFd payload;
    if (!by_fork) payload = sealed_memory("maniple-spawn", encode_payload(entry, function, arguments));
    if (options.daemon) lifeline.emplace();
    if (options.set_environment) endpoint = prepare_rendezvous(options);
    if (options.set_environment) {
      watch.listen_for_init(options.node_rank * options.nprocs);
      endpoint.point.joins = watch.joins().rank_end();
    }
    const int threads = options.set_environment ? threads_for_each(options.nprocs) : 0;
    for (int index = 0; index < options.nprocs; ++index) {
      auto [ours, theirs] = make_socket_pair();
      const SpawnAssignment assignment{.payload = payload.get(),
                           .report = theirs.get(),
                           .lifeline = lifeline ? lifeline->child_end() : -1,
                           .index = index};
      Variables variables;
      if (options.set_environment) variables = spawned_variables(options, index, endpoint.point, threads);
      const pid_t pid =
          by_fork ? start_fork(assignment, variables, entry, function, arguments) : start_reexec(assignment, variables);
      watch.add(pid, std::move(ours));
    }
    if (lifeline) lifeline->close_child_end();
    watch.joins().close_rank_end();
  }

  pid_t start_reexec(const SpawnAssignment& assignment, Variables variables) {
    SpawnActions actions;
    for (const int fd : {assignment.payload, assignment.report, assignment.lifeline, endpoint.point.secret, endpoint.point.joins}) actions.keep(fd);
    variables.emplace_back(kSpawnVariable, to_text(assignment));
    std::vector<std::string> words = own_arguments();
    std::vector<std::string> environment = changed_environment(environ, variables);
    pid_t pid = -1;
    const int code = ::posix_spawn(&pid, "/proc/self/exe", actions.actions(), actions.attributes(),
                                   pointers(words).data(), pointers(environment).data());
    if (code != 0)
      throw SystemError(fmt::format("spawn: starting process {} of {}: {}", assignment.index, options.nprocs, start_error_text(code)),
                        code);
    return pid;
  }

  pid_t start_fork(const SpawnAssignment& assignment, const Variables& variables, detail::SpawnEntry entry, void (*function)(),
                   const std::string& arguments) {
    std::fflush(nullptr);  // or the copies would write it again
    const pid_t pid = ::fork();
    const int error_code = errno;
    if (pid < 0)
      throw SystemError(fmt::format("spawn: fork of process {} of {}: {}", assignment.index, options.nprocs, start_error_text(error_code)),
                        error_code);
    if (pid > 0) return pid;
    int code = 1;
    try {
      for (const auto& [name, value] : variables)
        value.empty() ? ::unsetenv(name.c_str()) : ::setenv(name.c_str(), value.c_str(), 1);
      ::signal(SIGTERM, SIG_DFL);
      sigset_t none;
      sigemptyset(&none);
      ::sigprocmask(SIG_SETMASK, &none, nullptr);
      const UniqueFd empty(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      ::dup2(empty.get(), STDIN_FILENO);
      if (assignment.lifeline >= 0) hold_on_to(assignment.lifeline);
      code = run_spawned(entry, function, arguments, assignment.index, assignment.report);
    } catch (const std::exception& failure) {
      std::fprintf(stderr, "maniple: spawn: %s\n", failure.what());
    }
    std::fflush(nullptr);
    ::_exit(code);  // exit() would run what the parent has registered
  }

  bool join(std::optional<Seconds> timeout) {
    std::optional<SpawnWatch::Clock::time_point> until;
    if (timeout && *timeout < std::chrono::hours(24 * 365)) {
      until = SpawnWatch::Clock::now() +
              std::chrono::duration_cast<SpawnWatch::Clock::duration>(std::max(*timeout, Seconds(0)));
    }
    if (!watch.wait(until)) return false;
    if (!error) {
      if (!watch.first_failure()) return true;
      if (watch.only_consequences()) watch.wait_for_cause(SpawnWatch::Clock::now() + kTimeForCause);
      error = watch.first_failure();
      watch.end_all(options.grace);
      throw *error;
    }
    return true;
  }

  const SpawnOptions options;
  const pid_t owner = ::getpid();
  std::optional<Lifeline> lifeline;
  SpawnRendezvous endpoint;
  SpawnWatch watch;
  std::optional<SpawnError> error;
};

SpawnContext::SpawnContext(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
SpawnContext::SpawnContext(SpawnContext&&) noexcept = default;

SpawnContext& SpawnContext::operator=(SpawnContext&& other) noexcept {
  if (this != &other) {
    const SpawnContext before(std::move(*this));
    impl_ = std::move(other.impl_);
  }
  return *this;
}

SpawnContext::~SpawnContext() {
  if (!impl_ || impl_->owner != ::getpid() || impl_->watch.all_ended()) return;
  if (impl_->options.daemon || std::uncaught_exceptions() > 0) return;  // Impl ends them
  try {
    impl_->join(std::nullopt);
  } catch (const std::exception& error) {
    log_warning("{} (nobody called join() of its spawn)", error.what());
  }
}

const std::vector<int>& SpawnContext::pids() const noexcept {
  static const std::vector<int> kNone;
  return impl_ ? impl_->watch.pids() : kNone;
}

bool SpawnContext::join(std::optional<Seconds> timeout) { return !impl_ || impl_->join(timeout); }

const std::optional<SpawnError>& SpawnContext::error() const noexcept {
  static const std::optional<SpawnError> kNone;
  return impl_ ? impl_->error : kNone;
}

void SpawnContext::terminate() noexcept {
  if (impl_) impl_->watch.end_all(impl_->options.grace);
}

void SpawnContext::detach() {
  if (!impl_) return;
  if (impl_->options.daemon)
    throw Unsupported("spawn: daemons end with their parent and cannot be detached; start them without daemon");
  impl_->watch.forget_all();
  impl_.reset();
}

namespace detail {

SpawnContext start_spawn(const SpawnOptions& options, SpawnEntry entry, void (*function)(), std::string arguments) {
  check_spawn_options(options);
  auto impl = std::make_unique<SpawnContext::Impl>(options);
  impl->start(entry, function, arguments);
  SpawnContext context(std::move(impl));
  if (options.join) context.join();
  return context;
}

}  // namespace detail
}  // namespace maniple
