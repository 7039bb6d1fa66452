// The Trainer's training loop.
//
//   trainer.cpp            construction, checkpoints, the run and its epochs
//   training_step.cpp      a step, and an evaluation
//   elastic_training.cpp   an elastic job: how the members of a new generation get the same state and go on
//
// A step is *committed* when the optimizer has stepped and `state` counts it. What follows a step or an epoch (rows,
// hooks, evaluations, checkpoints) is divided into stages. In an elastic job, a member of the next generation continues
// with the first stage that the most advanced survivor had not finished.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "train/trainer/strategy.h"
#include "train/trainer/training_log.h"
#include <maniple/train/accumulation.h>
#include <maniple/train/stop.h>
#include <maniple/train/trainer.h>

namespace maniple {

struct Trainer::Impl {
  /// The last stage that was finished.
  enum class Stage : std::uint8_t {
    between_epochs,
    committed,  // the step
    step_row,
    hooks,
    evaluated,
    kept_best,
    decided,  // whether the training ends; saved
    passed,   // all batches of the epoch, or the training ends
    epoch_row,
    epoch_evaluated,
    epoch_kept_best,
    counted,  // the epoch
  };

  Impl(detail::TrainerModel model, torch::optim::Optimizer& o, TrainerOptions given);

  // Construction and checkpoints: trainer.cpp.
  static std::unique_ptr<TrainerStrategy> made_strategy(detail::TrainerModel model, torch::optim::Optimizer& optimizer,
                                                        const TrainerOptions& options);
  std::unique_ptr<Checkpoint> made_checkpoint(CheckpointOptions of);
  EarlyStoppingOptions stopping_options() const;
  std::string bits_text() const { return strategy ? strategy->bits_text() : bits; }
  std::string state_text() const;
  void load_state(const std::string& text);
  void save();

  // A step: training_step.cpp.
  double rate() const;
  Metrics& counted(Metrics& kept) { return strategy->reports() ? kept : uncounted; }
  bool divided() const { return strategy->virtual_ranks() != nullptr; }
  void make_metrics();
  void commit_metrics();
  MetricRow total_of(std::vector<Metrics>& parts) const;
  bool found_nonfinite(torch::Tensor norm);
  void report_nonfinite(const detail::TrainerBatch& batch);
  void step_optimizer(const detail::TrainerBatch& batch);
  void write_row();
  bool train_on(const detail::TrainerBatch& batch);
  bool after_step();
  bool stops_here();

  // An evaluation: training_step.cpp.
  MetricRow judge(const detail::TrainerData& data);
  void evaluate_now();
  void keep_best();

  // The run: trainer.cpp.
  std::string begin();
  void run();
  void train_to_the_end();
  void train_pass();
  void finish_epoch();
  /// Does the work of a stage unless it has been done.
  template <class Work>
  void reach(Stage next, Work&& work) {
    if (stage >= next) return;
    work();
    stage = next;
  }

  // An elastic job: elastic_training.cpp.
  bool is_elastic_job() const;
  void train_among_changes();
  void join_next_generation(std::vector<int> lost, std::string reason);
  bool failed_elsewhere(const Error& error) const;
  std::string same_job_text() const;
  void agree_on_state();
  void begin_together();
  void wait_for_checkpoints();
  void rebuild();
  std::string progress_text() const;
  void load_progress(const std::string& text);

  torch::optim::Optimizer& optimizer;  ///< the program's optimizer; strategy->optimizer() steps
  detail::TrainerModel model;
  TrainerOptions options;
  std::unique_ptr<TrainerStrategy> strategy;
  std::shared_ptr<ProcessGroup> group;  ///< null: this process alone
  /// Since the previous row: of this rank, or of each of its virtual ranks, or, in an elastic job, of all virtual
  /// ranks.
  std::vector<Metrics> metrics;
  std::vector<Metrics> step_parts;  ///< of the step under way, for each virtual rank of this rank
  std::optional<Accumulation> accumulation;
  EarlyStopping best_so_far;
  detail::TrainerScaler scaler;  ///< empty functions if there is no GradScaler
  std::vector<double> rates;     ///< rates of the optimizer's groups at the beginning, for options.lr
  Metrics uncounted;             ///< metrics of batches that other ranks count
  std::int64_t rows_step = 0;    ///< the step of the previous row
  std::string last_row;          ///< the line of the latest row in log.jsonl
  TrainerState state;
  Stage stage = Stage::between_epochs;
  std::string cursor;  ///< cursor of the data when run() ended, or, in an elastic job, after the last committed step
  bool begun = false;
  bool stop_asked = false;
  bool elastic = false;                          ///< the members of the job may change
  bool detached = false;                         ///< this process replaces a lost one and has not joined yet
  bool proven = false;                           ///< its bits have been compared with the others'
  std::string bits;                              ///< TrainerStrategy::bits_text() for the next generation's strategy
  std::string received;                          ///< during Checkpoint::copy_from: the source's progress_text()
  std::set<int> newcomers;                       ///< ranks of the group that have joined the training just now
  std::int64_t saved_step = -1, best_step = -1;  ///< of the latest checkpoints
  int log_rank = 0;                              ///< for which `log` was made

  // Set while run() runs.
  const detail::TrainerData* train = nullptr;
  const detail::TrainerData* evaluation = nullptr;
  std::optional<GracefulStop> stop;
  std::optional<TrainingLog> log;

  std::unique_ptr<Checkpoint> checkpoint;  ///< last: a save in progress must end before other members are destroyed
  std::unique_ptr<Checkpoint> best;
};

}  // namespace maniple
