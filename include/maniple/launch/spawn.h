// spawn: runs one function of this program in several processes, as ranks; like torch.multiprocessing.spawn.
//
//   void train(int rank, int epochs, const std::string& data) {
//     auto world = maniple::init();     // nothing to set: spawn has set the environment
//     ...
//   }
//   int main() { maniple::spawn(train, {.nprocs = 4}, 10, "data/"); }
//
// The call: `fn` is called as fn(rank, args...) with rank 0 to nprocs - 1. It is a function of the main program or a
// lambda without captures. Arguments are copied to the other process; maniple/launch/arguments.h lists the types. The
// result is ignored.
//
// Join: with `join`, spawn returns when all processes have returned from `fn`. As soon as one fails, spawn ends the
// others and throws the first failure as SpawnError. A process fails if it throws, exits with a code other than 0, is
// ended by a signal, or ends without calling maniple::init() while another one waits for it there. Without `join`,
// spawn returns a handle at once.
//
// Start methods: `reexec` (the default) runs this program's file again and calls `fn` instead of main, after static
// objects have been constructed. main itself does not run again; threads, locks and memory of this process do not
// matter. The program must link maniple::launch, dynamically (the default everywhere). `fork` copies this process as it
// is. That is safe only while the process has a single thread, so spawn refuses it otherwise.
//
// Environment: each process gets the variables that maniple::init() and PyTorch programs read: RANK, LOCAL_RANK,
// WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR, MASTER_PORT (a free port), the job's secret, and
// OMP_NUM_THREADS (cores / nprocs) unless it is set. Standard output and error are shared with this process; standard
// input is empty.
//
// Several machines: call spawn on each machine with the same `nodes` and its own `node_rank`. Ranks are node_rank *
// nprocs + i, where i is the argument of `fn`. The address of machine 0 comes from master_addr and master_port or from
// the variables MASTER_ADDR and MASTER_PORT, the secret from MANIPLE_SECRET_FILE. A program may instead compute ranks
// itself and pass rank and world size to init(): spawn keeps the MASTER_ADDR, MASTER_PORT and secret of its
// environment, unless this process is itself a rank (LOCAL_RANK is set).
//
// Threads: spawn may be called from any thread; a SpawnContext must be used by one thread at a time.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <maniple/comm/error.h>
#include <maniple/comm/options.h>
#include <maniple/export.h>
#include <maniple/launch/arguments.h>

namespace MANIPLE_API maniple {

/// How spawn starts a process; see the top of this file.
enum class StartMethod : std::uint8_t {
  fork,    ///< copies this process; refused if it has more than one thread
  reexec,  ///< runs the program's file again and calls `fn` instead of main
};

/// Options of spawn.
struct SpawnOptions {
  int nprocs = 1;       ///< processes on this machine, 1 to 4096
  bool join = true;     ///< wait for all processes; false: return a handle
  bool daemon = false;  ///< kill the processes when this process ends, however it ends
  StartMethod start_method = StartMethod::reexec;

  int nodes = 1;                 ///< number of machines that call spawn, each with `nprocs` processes
  int node_rank = 0;             ///< this machine's number
  int world_size = 0;            ///< 0: nodes * nprocs
  std::string master_addr = {};  ///< empty: MASTER_ADDR; loopback for one machine without MASTER_ADDR and MASTER_PORT
  int master_port = 0;           ///< 0: MASTER_PORT; a free port for one machine without them

  bool set_environment = true;  ///< false: the processes inherit this process's environment unchanged
  Seconds grace{5};             ///< between SIGTERM and SIGKILL when processes are ended
};

/// The first failure of a spawned process. kind() is the kind of its exception if that is one of Maniple's, otherwise
/// peer_lost. The text is one line, for example
///
///   [spawn process 1/4 pid 4711] threw std::runtime_error: no such file
///   [spawn process 1/4 pid 4711] was ended by signal 11 (SIGSEGV, Segmentation fault)
class SpawnError : public Error {
 public:
  struct Cause {
    int rank = -1;  ///< the number that `fn` was called with
    int pid = -1;
    int exit_code = -1;     ///< -1: it did not exit by itself
    int signal = 0;         ///< 0: none
    std::string type = {};  ///< exception type, "std::runtime_error"; empty: it did not throw
    std::string text = {};  ///< what(), unchanged; empty if there is none
    ErrorKind kind = ErrorKind::peer_lost;
  };
  SpawnError(const std::string& text, Cause cause)
      : Error(cause.kind, text), cause_(std::make_shared<Cause>(std::move(cause))) {}

  int rank() const noexcept { return cause_->rank; }
  int pid() const noexcept { return cause_->pid; }
  int exit_code() const noexcept { return cause_->exit_code; }
  int signal() const noexcept { return cause_->signal; }
  const std::string& type() const noexcept { return cause_->type; }
  const std::string& text() const noexcept { return cause_->text; }

 private:
  std::shared_ptr<const Cause> cause_;
};

/// The processes of one spawn. The destructor waits for them, as Python does at exit. It ends daemons instead of
/// waiting, and ends all processes if it runs because of an exception. A failure that join() has not thrown is logged
/// as a warning.
class SpawnContext {
 public:
  struct Impl;
  explicit SpawnContext(std::unique_ptr<Impl> impl) noexcept;
  SpawnContext(SpawnContext&&) noexcept;
  SpawnContext& operator=(SpawnContext&&) noexcept;
  ~SpawnContext();

  /// By rank. Unchanged after the processes have ended.
  const std::vector<int>& pids() const noexcept;

  /// Waits until all processes have ended and returns true; returns false if the timeout passes first. After a failure
  /// it ends the other processes and throws the first failure as SpawnError, once.
  bool join(std::optional<Seconds> timeout = std::nullopt);

  /// The first failure that join() has found; nullopt if there is none so far.
  const std::optional<SpawnError>& error() const noexcept;

  /// Ends all processes: SIGTERM, then SIGKILL after the grace time. Returns when none is left. Processes ended this
  /// way do not count as failures.
  void terminate() noexcept;

  /// Lets the processes run on by themselves and empties the handle. Throws `Unsupported` for daemons.
  void detach();

 private:
  std::unique_ptr<Impl> impl_;
};

namespace detail {

/// Reads the arguments and calls the function.
using SpawnEntry = void (*)(void (*function)(), ArgumentReader& arguments, int rank);
SpawnContext start_spawn(const SpawnOptions& options, SpawnEntry entry, void (*function)(), std::string arguments);

/// For the start-up code of a program that links maniple::launch: the replacement for main in a process that spawn
/// started, null in any other process.
using SpawnedMain = int (*)(int argc, char** argv, char** environment);
SpawnedMain take_over_start() noexcept;

/// How a parameter is stored until the call: by value; const char* and std::string_view as std::string.
template <class P>
struct Kept {
  using Type = std::decay_t<P>;
  static decltype(auto) hand_over(Type& value) {
    if constexpr (std::is_lvalue_reference_v<P>)
      return (value);
    else
      return std::move(value);
  }
};
template <class P>
  requires(std::is_same_v<std::decay_t<P>, const char*>)
struct Kept<P> {
  using Type = std::string;
  static const char* hand_over(Type& value) { return value.c_str(); }
};
template <class P>
  requires(std::is_same_v<std::decay_t<P>, std::string_view>)
struct Kept<P> {
  using Type = std::string;
  static std::string_view hand_over(Type& value) { return value; }
};

template <class... P>
struct Parameters {
  static constexpr std::size_t kCount = sizeof...(P);
  using Values = std::tuple<typename Kept<P>::Type...>;
  template <class Fn>
  static void call(Fn& fn, int rank, Values& values) {
    std::apply([&](auto&... value) { fn(rank, Kept<P>::hand_over(value)...); }, values);
  }
};

/// The parameters of a function after the rank. For a generic lambda void: then the arguments decide.
template <class Fn>
struct ParametersOf {
  using Type = void;
};
template <class R, class First, class... P>
struct ParametersOf<R (*)(First, P...)> {
  using Type = Parameters<P...>;
};
template <class R, class First, class... P>
struct ParametersOf<R (*)(First, P...) noexcept> {
  using Type = Parameters<P...>;
};
template <class R, class Class, class First, class... P>
struct ParametersOf<R (Class::*)(First, P...) const> {
  using Type = Parameters<P...>;
};
template <class R, class Class, class First, class... P>
struct ParametersOf<R (Class::*)(First, P...) const noexcept> {
  using Type = Parameters<P...>;
};
template <class R, class Class, class First, class... P>
struct ParametersOf<R (Class::*)(First, P...)> {
  using Type = Parameters<P...>;
};
template <class Fn>
  requires requires { &Fn::operator(); }
struct ParametersOf<Fn> : ParametersOf<decltype(&Fn::operator())> {};

template <class Fn, class Expected>
struct SpawnCall {
  static void run(void (*function)(), ArgumentReader& arguments, int rank) {
    auto values = arguments.get<typename Expected::Values>();
    arguments.expect_end();
    if constexpr (std::is_pointer_v<Fn>) {
      auto fn = reinterpret_cast<Fn>(function);
      Expected::call(fn, rank, values);
    } else {
      Fn fn{};
      Expected::call(fn, rank, values);
    }
  }
};

}  // namespace detail

/// See the top of this file. Throws InvalidArgument (impossible options, a function of a shared library), Unsupported
/// (fork with more than one thread; reexec in a program without maniple::launch or linked statically), SystemError
/// (processes cannot be started) and, with `join`, SpawnError.
template <class Function, class... Args>
SpawnContext spawn(Function&& function, const SpawnOptions& options = {}, Args&&... args) {
  using Fn = std::decay_t<Function>;
  using Known = typename detail::ParametersOf<Fn>::Type;
  using Expected = std::conditional_t<std::is_void_v<Known>, detail::Parameters<std::decay_t<Args>&...>, Known>;
  constexpr bool kIsPointer = std::is_pointer_v<Fn> && std::is_function_v<std::remove_pointer_t<Fn>>;
  static_assert(
      kIsPointer || (std::is_empty_v<Fn> && std::is_default_constructible_v<Fn>),
      "maniple::spawn takes a function or a lambda that captures nothing: another process does not see what is "
      "captured; pass it as an argument");
  static_assert(Expected::kCount == sizeof...(Args),
                "maniple::spawn(fn, options, args...) calls fn(rank, args...): the numbers of arguments differ");
  ArgumentWriter arguments;
  arguments.put(typename Expected::Values(std::forward<Args>(args)...));
  void (*address)() = nullptr;
  if constexpr (kIsPointer) {
    address = reinterpret_cast<void (*)()>(static_cast<Fn>(function));
    if (address == nullptr) throw InvalidArgument("spawn: the function is a null pointer");
  }
  return detail::start_spawn(options, &detail::SpawnCall<Fn, Expected>::run, address, arguments.take());
}

}  // namespace maniple
