// A progress line for a loop.
//
//   maniple::Progress progress(batches, {.label = "epoch 1", .unit = "samples"});
//   for (auto& batch : *loader) {
//     ...
//     progress.step(batch.data.size(0), fmt::format("loss {:.3f}", loss.item<float>()));
//   }
//   progress.finish();
//
//   epoch 1 [###################...........]  63 % 300/469  2210 samples/s  14 s left  loss 0.081
//
// On a terminal the line is redrawn in place, a few times per second. In a file or a pipe a new line is printed at
// every tenth of the way, and at least every half minute, so logs stay readable. Only rank 0 prints; on other ranks the
// calls cost nothing.
//
// If LibTorch uses a GPU, the line also shows GPU memory of the printing rank, "GPU 3.1 of 4.0 GiB": the peak used by
// tensors, and the amount reserved for them by the allocator.
//
// On a narrow terminal the line is shortened, the bar first; this also works after resizing. Labels and notes may be
// any UTF-8; they cannot break the line.
//
// When a loop resumes from a checkpoint, pass {.start = 128}. The bar then begins there, and throughput and remaining
// time refer to the steps since.
//
// Threads: one thread at a time. Errors: a null stream and a start beyond the total throw InvalidArgument; nothing else
// throws.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

enum class ProgressStyle {
  automatic,  ///< bar if the stream is a terminal, otherwise lines
  bar,
  lines,
  silent,
};

struct ProgressOptions {
  std::string label = "";
  std::string unit = "";  ///< unit of the amounts passed to step(); empty: no throughput
  ProgressStyle style = ProgressStyle::automatic;
  std::FILE* stream = stderr;
  std::size_t start = 0;  ///< steps finished by an earlier process; steps() includes them
  /// Only rank 0 of the default group prints; its counts are multiplied by the number of ranks. False, or without a
  /// default group: every process prints its own progress.
  bool only_rank_0 = true;
};

class Progress {
 public:
  using Clock = std::chrono::steady_clock;

  /// `total` is the number of steps. 0: unknown; then neither the bar nor the remaining time is shown.
  explicit Progress(std::size_t total, ProgressOptions options = {});
  ~Progress();  ///< calls finish() if necessary
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Counts a finished step with `amount` units on this rank. The line shows the units of all ranks, assuming equal
  /// amounts. `note` (for example a loss) appears at the end of the line.
  void step(std::size_t amount = 1, std::string_view note = {});

  /// Whether the next step would show its note: for notes that are expensive to make.
  bool is_due() const;

  /// Draws the final state and ends the line.
  void finish();

  std::size_t steps() const noexcept { return steps_; }
  double units_per_second() const;  ///< of all ranks, up to now or to finish()

 private:
  double elapsed() const;
  void draw();

  std::size_t total_;
  ProgressOptions options_;
  Clock::time_point start_;
  Clock::time_point drawn_;
  Clock::time_point end_;
  std::size_t drawn_columns_ = 0;
  std::size_t steps_ = 0;
  std::size_t amount_ = 0;
  std::size_t ranks_ = 1;      ///< number of ranks represented by this one
  std::size_t next_line_ = 0;  ///< lines: the step at which the next line is due
  std::string note_;
  bool finished_ = false;
};

}  // namespace maniple
