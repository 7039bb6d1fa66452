// The interface of a rank for a run's lambda: its rank, its world, and the harness's own communication.
//
// phase() and report() use the harness, never Maniple, so they work even when Maniple fails.
#pragma once

#include <sys/types.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <maniple/comm/process_group.h>

namespace maniple::harness {

/// A scripted fault: `.fault = kill_at(3, 10)` strikes rank 3 in its tenth call of `r.step()`.
struct Fault {
  enum class Kind { none, kill, stop, exit, raise, delay };
  Kind kind = Kind::none;
  int rank = -1;
  int step = 0;  ///< 1 is the first call of step()
  Seconds duration{0};

  /// Whether the rank ends abnormally or hangs.
  bool ends_rank() const noexcept { return kind != Kind::none && kind != Kind::delay; }
};

inline Fault kill_at(int rank, int step) { return {Fault::Kind::kill, rank, step, {}}; }    ///< SIGKILL
inline Fault stop_at(int rank, int step) { return {Fault::Kind::stop, rank, step, {}}; }    ///< SIGSTOP
inline Fault exit_at(int rank, int step) { return {Fault::Kind::exit, rank, step, {}}; }    ///< exit(7)
inline Fault throw_at(int rank, int step) { return {Fault::Kind::raise, rank, step, {}}; }  ///< throws InjectedFault
inline Fault delay_at(int rank, int step, Seconds duration) { return {Fault::Kind::delay, rank, step, duration}; }

/// Thrown by a scripted fault; a rank that ends by this exception does not fail the test.
struct InjectedFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The first word of the state in ControlChannel::set_link that sets the fraction of lost packets and its seconds.
inline constexpr const char* kLossState = "loss";

/// Connects a rank to its run.
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
    std::string dir;                 ///< the run's directory, shared by its ranks
    InitOptions init;                ///< complete options for init()
    std::shared_ptr<Store> store;    ///< threads only
    std::vector<pid_t> pids;         ///< of all ranks
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

  /// Initialises with the run's options or with `options`, and keeps the group in `world`.
  void init() { init(setup_.init); }
  void init(const InitOptions& options);

  /// Waits until all living ranks are in the phase `name`. Does not wait for dead or stopped ranks.
  void phase(const std::string& name) { channel_.phase(name); }

  /// Sends a value to the parent, where run_ranks returns it.
  void report(const std::string& key, const std::string& value) { channel_.report(key, value); }
  void report(const std::string& key, double value);

  /// Counts its calls, and triggers the run's scripted fault.
  void step();

  pid_t pid_of(int other) const { return setup_.pids.at(static_cast<std::size_t>(other)); }
  [[noreturn]] void kill_self();
  void stop_self();  ///< returns when this process is continued

  /// netns: silently drops packets to and from the host; its interfaces stay up.
  void blackhole(int other_host) { channel_.set_link(other_host, "nomaster"); }
  /// netns: ends blackhole().
  void heal(int other_host) { channel_.set_link(other_host, "master bridge"); }
  /// netns: takes the host's link down, as if its cable were pulled.
  void unplug(int other_host) { channel_.set_link(other_host, "down"); }
  /// netns with `lossy`: from now on, for `duration`, this fraction of all packets between hosts is lost.
  void lose_packets(double fraction, Seconds duration);

 private:
  Setup setup_;
  ControlChannel& channel_;
  int steps_ = 0;
};

/// Seconds of the monotonic clock, which all processes on a host share.
double now_s();

}  // namespace maniple::harness
