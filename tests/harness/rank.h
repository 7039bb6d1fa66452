// What the lambda of a run sees: who it is, its world, and the harness's own means of talking to the other ranks.
//
// phase() and report() go through the harness, never through Maniple, so they work when Maniple does not.
#pragma once

#include <sys/types.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <maniple/comm/process_group.h>

namespace maniple::harness {

/// A fault of a rank, scripted: `.fault = kill_at(3, 10)` strikes rank 3 when it calls `r.step()` for the tenth time.
struct Fault {
  enum class Kind { none, kill, stop, exit, raise, delay };
  Kind kind = Kind::none;
  int rank = -1;
  int step = 0;  ///< 1 is the first call of step()
  Seconds duration{0};

  /// The rank will not end the way other ranks do.
  bool ends_rank() const noexcept { return kind != Kind::none && kind != Kind::delay; }
};

inline Fault kill_at(int rank, int step) { return {Fault::Kind::kill, rank, step, {}}; }    ///< SIGKILL
inline Fault stop_at(int rank, int step) { return {Fault::Kind::stop, rank, step, {}}; }    ///< SIGSTOP
inline Fault exit_at(int rank, int step) { return {Fault::Kind::exit, rank, step, {}}; }    ///< exit(7)
inline Fault throw_at(int rank, int step) { return {Fault::Kind::raise, rank, step, {}}; }  ///< throws InjectedFault
inline Fault delay_at(int rank, int step, Seconds duration) { return {Fault::Kind::delay, rank, step, duration}; }

/// Thrown by a scripted fault; a rank that ends by it has not failed.
struct InjectedFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// What connects a rank to its run.
class ControlChannel {
 public:
  virtual ~ControlChannel() = default;
  virtual void phase(const std::string& name) = 0;
  virtual void report(const std::string& key, const std::string& value) = 0;
  virtual void set_link(int host, const std::string& state) = 0;
  virtual void initialised(const std::shared_ptr<ProcessGroup>& world) = 0;
};

class Rank {
 public:
  struct Setup {
    int rank = 0;
    int size = 1;
    int host = 0;
    std::string dir;                 ///< of this run, shared by its ranks
    InitOptions init;                ///< ready to be used
    std::shared_ptr<Store> store;    ///< threads only
    std::vector<pid_t> pids;         ///< of the ranks
    std::vector<std::string> hosts;  ///< addresses of the namespaces
    Fault fault;
  };
  Rank(Setup setup, ControlChannel& channel);

  const int rank;
  const int size;
  const int host;
  std::shared_ptr<ProcessGroup> world;  ///< null before init()

  const std::string& dir() const noexcept { return setup_.dir; }
  const InitOptions& init_options() const noexcept { return setup_.init; }
  const std::vector<std::string>& host_addresses() const noexcept { return setup_.hosts; }
  const std::shared_ptr<Store>& store() const noexcept { return setup_.store; }

  /// Initialises with the run's own options, or with others, and keeps the group in `world`.
  void init() { init(setup_.init); }
  void init(const InitOptions& options);

  /// Waits until all living ranks are in the phase of this name. Ranks that are dead or stopped are not waited for.
  void phase(const std::string& name) { channel_.phase(name); }

  /// Hands a value to the parent, which finds it in the result of run_ranks.
  void report(const std::string& key, const std::string& value) { channel_.report(key, value); }
  void report(const std::string& key, double value);

  /// Counts the calls; the run's scripted fault strikes here.
  void step();

  pid_t pid_of(int other) const { return setup_.pids.at(static_cast<std::size_t>(other)); }
  [[noreturn]] void kill_self();
  void stop_self();  ///< returns when somebody continues this process

  /// netns: packets to and from the host are dropped silently; its interfaces stay up.
  void blackhole(int other_host) { channel_.set_link(other_host, "nomaster"); }
  /// netns: ends that.
  void heal(int other_host) { channel_.set_link(other_host, "master bridge"); }
  /// netns: the host's cable is pulled.
  void unplug(int other_host) { channel_.set_link(other_host, "down"); }

 private:
  Setup setup_;
  ControlChannel& channel_;
  int steps_ = 0;
};

/// Seconds of the monotonic clock, which all processes of a host share.
double now_s();

}  // namespace maniple::harness
