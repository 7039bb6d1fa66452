// This host's workers in one generation of the group: starts them, copies their output, notices their ends, ends them.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/net/poller.h"
#include "comm/rendezvous/membership_page.h"
#include "launch/output/console.h"
#include "launch/output/log_pump.h"
#include "launch/placement/binding.h"
#include "launch/placement/rank_plan.h"
#include "launch/process/failure_report.h"
#include "launch/process/program.h"
#include "launch/process/rank_environment.h"
#include "launch/process/worker_messages.h"
#include "launch/workers/out_of_memory.h"

namespace maniple::launch {

/// The options of `maniple run` that concern the workers of every node.
struct WorkerOptions {
  std::vector<std::string> command = {};
  std::string folder = {};           ///< where they start; empty: here
  std::string log_folder = {};       ///< empty: no files
  std::vector<int> only_ranks = {};  ///< ranks whose output is shown; empty: all
  BindPolicy bind = BindPolicy::automatic;
  int cores_per_process = 0;    ///< 0: all cores are divided among the ranks
  bool verbose = false;         ///< print each rank's pid and cores
  bool terminal_output = true;  ///< workers' standard output is a pseudo-terminal, see StartOutput
  bool share_gpu = false;       ///< several ranks on one GPU, through MPS (see mps_daemon.h)
  int devices_per_node = 0;     ///< 0: all devices the node sees
  friend bool operator==(const WorkerOptions&, const WorkerOptions&) = default;
};

/// The settings that a host's workers share in all generations.
struct WorkerGroupSettings : WorkerOptions {
  Environment environment = {};  ///< the launcher's own plus the variables of --env
  std::string host = {};         ///< for reports
  bool quiet = false;
  int elastic_max = 0;  ///< of the whole job, if its workers may come and go while the others go on; 0: they may not
  bool input = true;    ///< rank 0 gets the launcher's standard input
};

/// Creates the folder and its parents. Throws InvalidArgument if that fails or the folder is not writable.
void make_log_folder(const std::string& path);

class WorkerGroup {
 public:
  struct Events {
    std::function<void(const RankExit&)> failed;  ///< a worker failed before end() was called
    std::function<void(const RankExit&)> absent;  ///< a worker exited with 0 before init() was done; first one only
    std::function<void(int rank)> waiting;        ///< a worker waits in init() for all others; first one only
    std::function<void(const RankExit&)> exited;  ///< a worker exited with 0 while others worked
    /// All exited with 0, or finish() was called, and no descendants are left.
    std::function<void()> finished;
    std::function<void()> ended;                            ///< after end(): no descendants are left
    std::function<void(const WorkerNotice&)> noticed = {};  ///< in an elastic job
  };

  WorkerGroup(Poller& poller, Console& console, WorkerGroupSettings settings, Events events);
  ~WorkerGroup();  ///< kills the remaining processes

  /// Starts one process per assignment. Throws InvalidArgument or SystemError; then nothing runs. `cores_first` and
  /// `cores_total` are the ranks' position among the job's ranks on this machine and their total number.
  void start(const std::vector<WorkerAssignment>& assignments, NodeEnvironment node, int cores_first, int cores_total);

  // In an elastic job:
  /// Starts a new worker, or one again whose process has ended. Throws like start(). `joins_late`: see NodeEnvironment.
  void replace(int rank, bool joins_late);
  void signal(int rank, int signal);
  /// Tells the workers that a signal, which follows, ends the whole job.
  void announce_end();
  /// All workers have ended.
  void finish();
  /// Publishes a generation to the workers. `members`: worker numbers in rank order.
  void publish(std::uint32_t generation, const std::vector<int>& members, const std::string& host, int port);

  /// Signals all process groups, and sends SIGKILL to everything that is left after `grace`. `reported`: the ranks that
  /// the user was shown as the cause.
  void end(int signal, std::chrono::duration<double> grace, const std::vector<int>& reported = {});

  /// Passes a signal on (SIGSTOP, SIGCONT).
  void signal_all(int signal);

  /// Call when a child of this process has ended, before it is reaped; false if it is not one of this group's workers.
  bool child_ended(pid_t pid, int code, int status);
  /// Call after children were reaped.
  void children_reaped();

  int running() const noexcept { return running_; }
  bool busy() const noexcept { return state_ != State::idle; }

 private:
  enum class State { idle, working, finishing, ending };
  struct Output {
    UniqueFd fd;
    std::unique_ptr<LogPump> pump;
    bool paused = false;
  };
  struct Member {
    WorkerAssignment assignment;
    pid_t pid = -1;
    bool running = false;
    bool ok = false;
    bool held = false;  // its outputs are held back: it reported a repeated error and may be about to end
    Output out;
    Output err;
    std::shared_ptr<OutputTail> tail;
    OomCounters counters;
  };

  std::vector<std::vector<int>> choose_cores(const CoreRequest& request, NodeEnvironment& node);
  void start_member(const WorkerAssignment& assignment, bool joins_late);
  Member* member_of(int rank);
  void attach(Output& output, UniqueFd fd, Member& member, bool to_err, std::shared_ptr<LogFile> file);
  void read_from(Output& output, bool until_empty);
  void pause_if_congested(Output& output);
  void resume_all(bool to_err);
  void take_report(Member& member, const ErrorInfo& failure);
  void end_held(Member& member);
  void show_held();
  static void show(Member& member);
  void open_messages();
  void receive_messages();
  void close_outputs();
  void kill_rest();
  void give_up();
  void wait_for_descendants();
  void check_finished();
  void become_idle();

  Poller& poller_;
  Console& console_;
  WorkerGroupSettings settings_;
  Events events_;
  State state_ = State::idle;
  bool killed_ = false;  // SIGKILL was sent to all
  bool warned_about_files_ = false;
  std::vector<std::unique_ptr<Member>> members_;
  int running_ = 0;
  // What start() was given, for workers that are started again:
  std::optional<Program> program_;
  NodeEnvironment node_;
  std::vector<std::vector<int>> cpus_;  // per worker; empty: not bound
  std::optional<MembershipPage> page_;  // in an elastic job
  Poller::Clock::time_point started_{};
  Poller::Timer timer_ = 0;
  std::string buffer_;
  RepeatedErrors repeated_;
  Poller::Timer repeated_timer_ = 0;
  WorkerMessages messages_;
  bool waiting_reported_ = false;
  bool absent_reported_ = false;
};

}  // namespace maniple::launch
