// Ending a training before its last step: because somebody said so, or because it no longer gets better.
//
//   maniple::GracefulStop stop;                                  // SIGINT and SIGTERM now only set a flag
//   for (; step < steps; ++step) {
//     ... forward, backward, optimizer.step() ...
//     if (stop.requested_anywhere()) {                           // the same answer, at the same step, on all ranks
//       checkpoint.save(step + 1);
//       break;
//     }
//   }
//
//   maniple::EarlyStopping early({.patience = 5, .mode = maniple::StopMode::min});
//   for (...) {
//     ... an epoch ...
//     if (early.update(validation_loss)) break;                  // five times no better than the best
//     if (early.improved()) checkpoint.save(step);
//   }
//
// Under `maniple run`, Ctrl-C and SIGTERM to the launcher reach every worker, which then has `--grace-interrupt`
// seconds (30) to save and end. Schedulers that take a machine away (Slurm, Kubernetes, spot instances) send SIGTERM as
// well.
#pragma once

#include <atomic>
#include <csignal>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct GracefulStopOptions {
  std::vector<int> signals = {SIGINT, SIGTERM};
  /// The ranks communicate in every so many calls of requested_anywhere; the calls between cost nothing and return
  /// false.
  int every = 1;
};

/// Turns signals into a question that the loop asks. One at a time in a process; made before the training, in any
/// thread.
///
/// The first signal sets a flag and nothing else. A second one (of any of the signals) ends the process at once by its
/// default action, for people who do not want to wait; but not within 0.2 s of the first, because some launchers pass
/// on a Ctrl-C that the terminal has sent to everyone already. A signal that was ignored (nohup, a background job of a
/// shell) stays ignored.
class GracefulStop {
 public:
  /// Throws InvalidArgument if there is one already, or for a signal that cannot be caught.
  explicit GracefulStop(GracefulStopOptions options = {});
  ~GracefulStop();  ///< puts the handlers back that were there before
  GracefulStop(const GracefulStop&) = delete;
  GracefulStop& operator=(const GracefulStop&) = delete;

  /// Whether this process was asked, by a signal or by request(). Ranks may get their signals at different steps, or
  /// only one of them gets one: decide nothing by this that others take part in.
  bool requested() const noexcept;

  /// Whether any rank was asked. A collective (a reduction of one number, some microseconds within a host): every rank
  /// calls it equally often, normally once at the end of a step. Once true, always true, without communication. Without
  /// a group (null, and no default group) it is requested().
  bool requested_anywhere(const std::shared_ptr<ProcessGroup>& group = nullptr,
                          const SourceLocation& where = SourceLocation::current());

  /// As a signal would: for a limit of time, say. Any thread.
  void request() noexcept { asked_.store(true); }

  /// The signal that did it, here or (after requested_anywhere said so) on another rank; 0: none, or request().
  int signal() const noexcept;

 private:
  struct Previous {
    int number;
    struct sigaction action;
  };
  void restore() noexcept;

  int every_;
  std::vector<Previous> previous_;
  std::atomic<bool> asked_ = false;
  std::uint64_t calls_ = 0;
  bool agreed_ = false;
  int agreed_signal_ = 0;
};

enum class StopMode {
  min,  ///< smaller is better: a loss
  max,  ///< larger is better: an accuracy
};

struct EarlyStoppingOptions {
  int patience = 3;      ///< so many updates in a row without an improvement end it; at least 1
  double min_delta = 0;  ///< what is better by no more than this is no improvement; not negative
  StopMode mode = StopMode::min;
  /// Whose ranks decide together. Null: the default group if there is one, otherwise this process alone.
  std::shared_ptr<ProcessGroup> group = nullptr;
};

/// Notices that a number no longer gets better.
class EarlyStopping {
 public:
  explicit EarlyStopping(EarlyStoppingOptions options = {});

  /// Takes the number of an epoch, and says whether to stop; once it said so, it always does. In a group this is a
  /// collective: rank 0's number counts, on all ranks, so that all decide alike even where theirs differ in the last
  /// bit. NaN is no improvement.
  bool update(double value, const SourceLocation& where = SourceLocation::current());

  bool should_stop() const noexcept { return waited_ >= options_.patience; }
  bool improved() const noexcept { return updates_ > 0 && best_update_ == updates_; }  ///< by the latest update
  double best() const noexcept { return best_; }                                       ///< NaN before the first
  std::int64_t updates() const noexcept { return updates_; }
  std::int64_t best_update() const noexcept { return best_update_; }  ///< counted from 1; 0: none
  int waited() const noexcept { return waited_; }                     ///< updates since the best one

  /// For a checkpoint: checkpoint.add("early", early).
  std::string state_dict() const;
  void load_state_dict(const std::string& text);  ///< throws InvalidArgument if it is none; then nothing is changed

 private:
  EarlyStoppingOptions options_;
  double best_;
  std::int64_t updates_ = 0;
  std::int64_t best_update_ = 0;
  int waited_ = 0;
};

}  // namespace maniple
