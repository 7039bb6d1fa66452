// Finds the rank whose failure ended a job, and describes it. Pure. (A rank's own report is the FailureReport in
// comm/base/error_codec.h.)
//
// When one rank dies, the other ranks soon fail as well because they wait for it. The user needs to see the first
// failure: the one that did not begin on another rank.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <maniple/comm/error.h>

namespace maniple::launch {

/// How a worker ended, and the known reasons.
struct RankExit {
  int rank = 0;
  int node_rank = 0;
  std::string host = {};
  int pid = 0;     ///< negative: it could not be started, see `error`
  int code = 0;    ///< exit code; meaningless when `signal` is set
  int signal = 0;  ///< 0: it exited by itself
  /// Detail about the end: "by the kernel's out-of-memory killer: ..." after a signal, or "before init() ..." after
  /// exit code 0, which then counts as a failure. May be empty.
  std::string cause = {};
  std::string error = {};    ///< its reported error, or the last line of its output that looks like one; may be empty
  bool consequence = false;  ///< the reported error began on another rank
  int blamed = -1;           ///< that other rank, if it is known and did not leave in good order
  int left = -1;             ///< that other rank, if it left in good order
  std::vector<std::string> tail = {};  ///< the last lines of its log
  std::int64_t at_us = 0;              ///< time of the end in microseconds since the group was started on its node

  bool failed() const noexcept { return signal != 0 || code != 0 || !cause.empty(); }
  /// The launcher's exit code after a failure: the rank's own code, 128 + signal for signals, 1 if the rank's was 0.
  int exit_code() const noexcept { return signal != 0 ? 128 + signal : code != 0 ? code : 1; }
  friend bool operator==(const RankExit&, const RankExit&) = default;
};

/// Whether the error that global rank `rank` reports began on another rank. A timeout began on the ranks that it names
/// as missing.
bool is_consequence(const ErrorInfo& error, int rank);

/// The rank on which a consequence began; -1: unknown, or the rank left in good order.
int blamed_rank(const ErrorInfo& error);

/// The rank that a lost peer's report names, if that peer left in good order; -1: none.
int left_rank(const ErrorInfo& error);

/// A rank may report several failures, one for each of its groups. Whether `later`, reported `after` seconds, follows
/// from `earlier`: the rank lost a peer in one group and then aborted its other groups, or lost others that ended as
/// well. `earlier` then says why the rank fails. Otherwise the program has handled `earlier`, and `later` is new.
bool follows_from(const ErrorInfo& earlier, const ErrorInfo& later, int rank, std::chrono::duration<double> after);

/// Index of the exit that caused the other exits. `exits` must not be empty.
///
/// An exit that is not a consequence wins over consequences. Among equals, a signal wins over an exit code if they
/// ended within 20 ms of each other; otherwise the earlier exit wins. If all exits are consequences, the exit of the
/// blamed rank wins; if ranks blame each other, the rank that is blamed most often.
std::size_t first_cause(const std::vector<RankExit>& exits);

/// True if the caller should wait briefly for another exit, because all failures so far are consequences.
bool cause_may_follow(const std::vector<RankExit>& exits);

/// The rank that caused `exits`, if all are consequences and none is its own: the rank is stopped, is cut off or still
/// runs. -1: none.
int unseen_cause(const std::vector<RankExit>& exits);

/// The rank that caused `exits` by ending early with exit code 0, while other ranks waited for it: one of `ended`, the
/// ranks that have ended with 0. Null: none.
const RankExit* early_end(const std::vector<RankExit>& exits, const std::vector<RankExit>& ended);

/// The report for people: several lines, the last without a line break. `unseen`: see unseen_cause(). `early`: see
/// early_end().
std::string describe_failure(const RankExit& exit, int world_size, int unseen = -1, const RankExit* early = nullptr);

/// "exit code 3", "signal SIGSEGV (segmentation fault)".
std::string describe_end(const RankExit& exit);

/// "SIGSEGV", or "signal 40" for a signal without a name.
std::string signal_name(int signal);

}  // namespace maniple::launch
