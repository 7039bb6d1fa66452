#include <maniple/launch/spawn.h>

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/fork_guard.h"
#include "comm/base/log.h"
#include "comm/base/system_error.h"
#include "launch/process/descriptors.h"
#include "launch/process/start.h"
#include "launch/spawn/child_main.h"
#include "launch/spawn/children.h"

namespace maniple {
namespace {

using namespace launch;

// Time for the cause of a reported failure to end, too: it may still unwind its stack when the other processes notice.
constexpr auto kTimeForCause = std::chrono::seconds(1);

// This process's own arguments, so that `ps` shows them for the children.
std::vector<std::string> own_arguments() {
  std::ifstream in("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string word; std::getline(in, word, '\0');) arguments.push_back(word);
  if (arguments.empty()) arguments.emplace_back("maniple-spawned");
  return arguments;
}

}  // namespace

struct SpawnContext::Impl {
  explicit Impl(const SpawnOptions& given) : options(given) {}
  ~Impl() {
    // A forked child has a copy of the handle, but the processes are not its children.
    if (!guard.owned()) return;
    watch.end_all(options.grace);
  }

  void start(detail::SpawnEntry entry, void (*function)(), const std::string& arguments) {
    const bool by_fork = options.start_method == StartMethod::fork;
    if (by_fork) check_fork_is_safe();
    if (!by_fork && !takeover_is_possible())
      throw Unsupported(
          "spawn: start method reexec needs a program that links maniple::launch, dynamically; link that target, "
          "without "
          "-static, or use StartMethod::fork");
    UniqueFd payload;
    if (!by_fork) payload = sealed_memory("maniple-spawn", encode_payload(entry, function, arguments));
    if (options.daemon) parent_pipe.emplace();
    if (options.set_environment) {
      rendezvous = prepare_rendezvous(options);
      watch.open_messages(options.node_rank * options.nprocs);
      rendezvous.node.init_fd = watch.messages().rank_end();
    }
    const Environment own = own_environment();
    for (int index = 0; index < options.nprocs; ++index) {
      auto [ours, theirs] = make_socket_pair();
      const SpawnAssignment assignment{.payload = payload.get(),
                                       .report = theirs.get(),
                                       .parent_pipe = parent_pipe ? parent_pipe->child_end() : -1,
                                       .index = index};
      Environment environment = own;
      if (options.set_environment) environment = rank_environment(own, rendezvous.node, assignment_of(options, index));
      const pid_t pid = by_fork ? start_fork(assignment, environment, entry, function, arguments)
                                : start_reexec(assignment, environment);
      watch.add(pid, std::move(ours));
    }
    if (parent_pipe) parent_pipe->close_child_end();
    watch.messages().close_rank_end();
  }

  std::string name_of(int index) const { return fmt::format("spawn: process {} of {}", index, options.nprocs); }

  pid_t start_reexec(const SpawnAssignment& assignment, Environment& environment) {
    set_variable(environment, kSpawnVariable, to_text(assignment));
    const Program program{.path = "/proc/self/exe", .argv = own_arguments()};
    return start_process({.program = &program,
                          .environment = &environment,
                          .name = name_of(assignment.index),
                          .output = StartOutput::inherited,
                          .inherited = {assignment.payload, assignment.report, assignment.parent_pipe,
                                        rendezvous.node.secret_fd, rendezvous.node.init_fd},
                          .own_session = false})
        .pid;
  }

  pid_t start_fork(const SpawnAssignment& assignment, const Environment& environment, detail::SpawnEntry entry,
                   void (*function)(), const std::string& arguments) {
    std::fflush(nullptr);  // or the children would write the buffered output again
    const pid_t pid = ::fork();
    const int error_code = errno;
    if (pid < 0)
      throw SystemError(fmt::format("starting {}: {}", name_of(assignment.index), start_error_text(error_code)),
                        error_code);
    if (pid > 0) return pid;
    int code = 1;
    try {
      ::clearenv();
      for (const std::string& entry_text : environment) ::putenv(::strdup(entry_text.c_str()));
      ::signal(SIGTERM, SIG_DFL);
      sigset_t none;
      sigemptyset(&none);
      ::sigprocmask(SIG_SETMASK, &none, nullptr);
      const UniqueFd empty(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      ::dup2(empty.get(), STDIN_FILENO);
      if (assignment.parent_pipe >= 0) die_with_parent(assignment.parent_pipe);
      code = run_spawned(entry, function, arguments, assignment.index, assignment.report);
    } catch (const std::exception& failure) {
      std::fprintf(stderr, "maniple: spawn: %s\n", failure.what());
    }
    std::fflush(nullptr);
    ::_exit(code);  // exit() would run the parent's exit handlers
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
      watch.wait_for_cause(SpawnWatch::Clock::now() + kTimeForCause);
      error = watch.first_failure();
      watch.end_all(options.grace);
      throw *error;
    }
    return true;
  }

  const SpawnOptions options;
  ForkGuard guard;
  std::optional<ParentPipe> parent_pipe;
  SpawnRendezvous rendezvous;
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
  if (!impl_ || !impl_->guard.owned() || impl_->watch.all_ended()) return;
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
