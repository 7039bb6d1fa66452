// The parent's side of spawn: checks the options, watches the processes, finds the first failure and ends the rest.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "comm/base/unique_fd.h"
#include "launch/process/failure_report.h"
#include "launch/process/rank_environment.h"
#include "launch/process/worker_messages.h"
#include "launch/spawn/child_main.h"
#include <maniple/launch/spawn.h>

namespace maniple::launch {

class SpawnWatch {
 public:
  using Clock = std::chrono::steady_clock;

  SpawnWatch() = default;
  SpawnWatch(const SpawnWatch&) = delete;
  SpawnWatch& operator=(const SpawnWatch&) = delete;

  /// Call first: the processes then report on messages().rank_end() that they are in init(). `first_rank` is the rank
  /// of the first process.
  void open_messages(int first_rank);
  WorkerMessages& messages() noexcept { return messages_; }

  /// Adds a process that was just started, and the socket end on which its report arrives.
  void add(pid_t pid, UniqueFd report);

  const std::vector<int>& pids() const noexcept { return pids_; }
  bool all_ended() const noexcept;

  /// Waits until all have ended or one has failed; false when `until` passes first.
  bool wait(std::optional<Clock::time_point> until);

  /// The earliest known failure; nullopt: none.
  std::optional<SpawnError> first_failure() const;
  /// Keeps waiting while all known failures are consequences of another process's failure ("peer lost").
  bool wait_for_cause(Clock::time_point until);

  /// Sends SIGTERM, and SIGKILL after `grace`. Later exits no longer count as failures.
  void end_all(Seconds grace) noexcept;
  /// Stops watching: the processes keep running, and this object does not wait for them.
  void forget_all() noexcept;

 private:
  struct Process {
    pid_t pid = -1;
    UniqueFd pidfd;   // empty on old kernels
    UniqueFd report;  // non-blocking
    std::string received = {};
    bool ended = false;
    bool status_known = false;
    int status = 0;
    bool ended_by_us = false;
    bool absent = false;  // exited with 0 while another process waits for it in init()
    std::optional<SpawnReport> answer = std::nullopt;
  };

  static void look_at(Process& process);
  static void read_report(Process& process);
  void look_at_all();
  void look_for_absent();
  static bool has_failed(const Process& process);
  std::vector<RankExit> failures() const;
  SpawnError error_of(std::size_t rank) const;
  void sleep_until_change(std::optional<Clock::time_point> until);
  void signal_all(int signal) noexcept;

  std::vector<Process> processes_;
  std::vector<int> pids_;
  WorkerMessages messages_;
  int first_rank_ = 0;
};

void check_spawn_options(const SpawnOptions& options);

/// Throws Unsupported when this process has threads: fork would copy their locks but not the threads.
void check_fork_is_safe();

/// The address of rank 0, a port that stays reserved while `reservation` is open, and the job's secret.
struct SpawnRendezvous {
  NodeEnvironment node;
  UniqueFd reservation;
  UniqueFd secret;
};
SpawnRendezvous prepare_rendezvous(const SpawnOptions& options);

/// The assignment of process `index` in the job. Pure.
WorkerAssignment assignment_of(const SpawnOptions& options, int index);

}  // namespace maniple::launch
