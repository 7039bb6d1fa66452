// Ends training early: on a signal or request, or when a metric stops improving.
//
//   maniple::GracefulStop stop;                                  // SIGINT and SIGTERM now only set a flag
//   for (; step < steps; ++step) {
//     ... forward, backward, optimizer.step() ...
//     if (stop.requested_anywhere()) {                           // the same result, at the same step, on all ranks
//       checkpoint.save(step + 1);
//       break;
//     }
//   }
//
//   maniple::EarlyStopping early({.patience = 5, .mode = maniple::StopMode::min});
//   for (...) {
//     ... an epoch ...
//     if (early.update(validation_loss)) break;                  // five updates without improvement
//     if (early.improved()) checkpoint.save(step);
//   }
//
// Under `maniple run`, Ctrl-C and SIGTERM to the launcher reach every worker, which then has `--grace-interrupt`
// seconds (30) to save and exit. Schedulers that reclaim a machine (Slurm, Kubernetes, spot instances) send SIGTERM as
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
  /// requested_anywhere() communicates in every `every`-th call; the calls between cost nothing and return false.
  int every = 1;
};

/// Turns signals into a flag that the loop polls. Only one may exist per process. Make it before training, in any
/// thread.
///
/// The first signal only sets the flag. A second one (of any of the signals) ends the process at once by its default
/// action, for users who do not want to wait. Within 0.2 s of the first it is ignored, because some launchers forward a
/// Ctrl-C that the terminal has already sent to all processes. A signal that was ignored before (nohup, a shell's
/// background job) stays ignored.
class GracefulStop {
 public:
  /// Throws InvalidArgument if another GracefulStop exists, or for a signal that cannot be caught.
  explicit GracefulStop(GracefulStopOptions options = {});
  ~GracefulStop();  ///< restores the previous handlers
  GracefulStop(const GracefulStop&) = delete;
  GracefulStop& operator=(const GracefulStop&) = delete;

  /// Whether this process received a signal or request(). Ranks may receive signals at different steps, or only one
  /// rank may receive one: do not use this for decisions that other ranks take part in.
  bool requested() const noexcept;

  /// Whether any rank received a signal or request(). A collective (a reduction of one number, some microseconds within
  /// a host): every rank calls it the same number of times, normally once at the end of a step. Once true, it stays
  /// true, without communication. Without a group (null, and no default group) it equals requested().
  bool requested_anywhere(const std::shared_ptr<ProcessGroup>& group = nullptr,
                          const SourceLocation& where = SourceLocation::current());

  /// Acts like a signal, for example for a time limit. May be called from any thread.
  void request() noexcept { asked_.store(true); }

  /// The signal received here or, after requested_anywhere() returned true, on another rank. 0: none, or request().
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
  int patience = 3;      ///< stop after this many updates in a row without improvement; at least 1
  double min_delta = 0;  ///< an improvement must exceed this value; not negative
  StopMode mode = StopMode::min;
  /// The ranks that decide together. Null: the default group; without one, this process alone.
  std::shared_ptr<ProcessGroup> group = nullptr;
};

/// Detects when a value stops improving.
class EarlyStopping {
 public:
  explicit EarlyStopping(EarlyStoppingOptions options = {});

  /// Takes the value of an epoch and returns whether to stop; once true, it stays true. In a group this is a
  /// collective: rank 0's value counts for all ranks, so they decide alike even if their values differ in the last bit.
  /// NaN never counts as an improvement.
  bool update(double value, const SourceLocation& where = SourceLocation::current());

  bool should_stop() const noexcept { return waited_ >= options_.patience; }
  bool improved() const noexcept { return updates_ > 0 && best_update_ == updates_; }  ///< in the latest update
  double best() const noexcept { return best_; }                                       ///< NaN before the first update
  std::int64_t updates() const noexcept { return updates_; }
  std::int64_t best_update() const noexcept { return best_update_; }  ///< counted from 1; 0: none
  int waited() const noexcept { return waited_; }                     ///< updates since the best one

  /// For a checkpoint: checkpoint.add("early", early).
  std::string state_dict() const;
  void load_state_dict(const std::string& text);  ///< throws InvalidArgument, and changes nothing, if invalid

 private:
  EarlyStoppingOptions options_;
  double best_;
  std::int64_t updates_ = 0;
  std::int64_t best_update_ = 0;
  int waited_ = 0;
};

}  // namespace maniple
