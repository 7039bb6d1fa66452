// Why a job ended: which rank failed first, and how that is shown. Pure. (What a rank itself reports is the
// FailureReport of comm/base/error_codec.h.)
//
// When one rank dies the others soon fail as well, because they wait for it. What a user needs is the first: the one
// whose failure did not begin on another rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <maniple/comm/error.h>

namespace maniple::launch {

/// How a worker ended, and what is known of the reason.
struct RankExit {
  int rank = 0;
  int node_rank = 0;
  std::string host = {};
  int pid = 0;     ///< negative: it could not even be started; `error` says why
  int code = 0;    ///< exit code; meaningless when `signal` is set
  int signal = 0;  ///< 0: it exited by itself
  /// What is known about the end: "by the kernel's out-of-memory killer: ..." after a signal, "before init() ..." after
  /// exit code 0, which is a failure then. May be empty.
  std::string cause = {};
  std::string error = {};  ///< what it reported, or the last line of its output that looks like an error; may be empty
  bool consequence = false;            ///< what it reported began on another rank
  int blamed = -1;                     ///< that rank, if it is known and did not leave in good order
  std::vector<std::string> tail = {};  ///< the last lines of its log
  std::int64_t at_us = 0;              ///< when, since the group was started on its node

  bool failed() const noexcept { return signal != 0 || code != 0 || !cause.empty(); }
  /// The launcher's exit code after a failure: that of the rank, 128 + signal for signals; 1 where the rank's was 0.
  int exit_code() const noexcept { return signal != 0 ? 128 + signal : code != 0 ? code : 1; }
  friend bool operator==(const RankExit&, const RankExit&) = default;
};

/// Whether what `rank` (of the world) reports began on another rank. A time-out began on the ranks that it names as
/// missing.
bool is_consequence(const ErrorInfo& error, int rank);

/// The rank on which a consequence began; -1: unknown, or it left in good order.
int blamed_rank(const ErrorInfo& error);

/// Index of the exit that was the cause of the others. `exits` must not be empty.
///
/// One that is no consequence comes before those that are; among equals one killed by a signal comes before one that
/// exited, if they ended within 20 ms of each other; then the earlier one. Among consequences alone, the exit of the
/// rank that the others blame; of ranks that blame each other, the one that most of all blame.
std::size_t first_cause(const std::vector<RankExit>& exits);

/// True if it is worth waiting a little for another exit: the only failures so far are consequences.
bool cause_may_follow(const std::vector<RankExit>& exits);

/// The rank that caused exits which are all consequences, if none of them is its own: it is stopped, cut off, or goes
/// on. -1: none.
int unseen_cause(const std::vector<RankExit>& exits);

/// Several lines, the last without a line break. `unseen`: see unseen_cause().
std::string describe_failure(const RankExit& exit, int world_size, int unseen = -1);

/// "exit code 3", "signal SIGSEGV (segmentation fault)".
std::string describe_end(const RankExit& exit);

/// "SIGSEGV"; "signal 40" for those without a name.
std::string signal_name(int signal);

}  // namespace maniple::launch
