// The training log that rank 0 writes: the progress line, curves for TensorBoard, and log.jsonl.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "comm/base/unique_fd.h"
#include <maniple/train/progress.h>
#include <maniple/train/summary_writer.h>
#include <maniple/train/trainer.h>

namespace maniple {

class TrainingLog {
 public:
  /// `resumed`: where the training resumes ("epoch 1, place 512 of 60000"); empty for a new training. Throws
  /// SystemError if the folder cannot be created.
  TrainingLog(const TrainerOptions& options, int rank, bool default_group, const TrainerState& state,
              const std::string& resumed);

  /// Starts the progress line of an epoch of `total` batches; 0: unknown.
  void begin_epoch(const TrainerState& state, std::size_t epochs, std::size_t total);
  void batch(double samples);
  void end_epoch();

  /// Writes a row of metrics; `kind` is "train" or "evaluation". Returns its line of log.jsonl, on all ranks.
  std::string row(std::string_view kind, const TrainerState& state, const MetricRow& metrics, double lr);

  /// Writes the line of a row unless log.jsonl ends with it: rank 0 may have died before it wrote the row, or after.
  void write_again(const std::string& line);

 private:
  void write_line(const std::string& line);
  bool has(const std::string& line) const;

  bool logs_;  ///< there is a log, of this rank or of another
  bool writes_;
  bool shows_;
  bool default_group_;
  std::optional<SummaryWriter> curves_;
  std::string path_;  ///< of log.jsonl
  UniqueFd lines_;
  std::unique_ptr<Progress> progress_;
  std::string note_;  ///< the latest training row
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace maniple
