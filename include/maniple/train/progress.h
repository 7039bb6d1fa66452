// How far a loop is, for the person in front of it.
//
//   maniple::Progress progress(batches, {.label = "epoch 1", .unit = "samples"});
//   for (auto& batch : *loader) {
//     ...
//     progress.step(batch.data.size(0), fmt::format("loss {:.3f}", loss.item<float>()));
//   }
//   progress.finish();
//
//   epoch 1 [#########################..............]  64 % 300/469  2210 samples/s  14 s left  loss 0.081
//
// On a terminal the line is redrawn in place, a few times a second. In a file or a pipe it becomes a line of its own
// now and then (every tenth part of the way, and at least every half minute), so that logs stay readable. Only rank 0
// prints; elsewhere the calls cost nothing.
//
// Where LibTorch uses a GPU, the line has its memory as well, "GPU 3.1 of 4.0 GiB": the most that tensors have taken so
// far, and that its allocator has reserved for them, on the rank that prints.
//
// A terminal that is narrow, or is made narrower, gets a shorter line: the bar goes first. Labels and notes may be any
// UTF-8; they cannot break the line.
//
// A loop that is resumed in the middle, after a checkpoint, gives {.start = 128}. The bar then begins there, and
// throughput and time left are of the steps since.
//
// One thread at a time. Nothing is thrown but for a stream that is null and a start
// beyond the total (InvalidArgument).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

enum class ProgressStyle {
  automatic,  ///< bar when the stream is a terminal, lines otherwise
  bar,
  lines,
  silent,
};

struct ProgressOptions {
  std::string label = "";
  std::string unit = "";  ///< of what step() counts; empty: no throughput
  ProgressStyle style = ProgressStyle::automatic;
  std::FILE* stream = stderr;
  std::size_t start = 0;  ///< steps that an earlier process has done; steps() counts them
  /// Rank 0 of the default group prints, for all: what it counts is multiplied by the number of ranks. False, or
  /// without a default group: every process prints, for itself.
  bool only_rank_0 = true;
};

class Progress {
 public:
  using Clock = std::chrono::steady_clock;

  /// `total` is the number of steps; 0: not known, then there is neither bar nor time left.
  explicit Progress(std::size_t total, ProgressOptions options = {});
  ~Progress();  ///< finishes, if that was not done
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// One step is done, with `amount` units in it on this rank; the line shows those of all ranks, taking them to be
  /// equal. `note` (a loss, say) is shown at the end of the line.
  void step(std::size_t amount = 1, std::string_view note = {});

  /// Whether the note of the next step would be shown now: for notes that are expensive to make.
  bool is_due() const;

  /// Draws the last state and ends the line.
  void finish();

  std::size_t steps() const noexcept { return steps_; }
  double units_per_second() const;  ///< of all ranks, up to now, or to finish()

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
  std::size_t ranks_ = 1;      ///< for which this one counts
  std::size_t next_line_ = 0;  ///< lines: the step at which the next one is due
  std::string note_;
  bool finished_ = false;
};

}  // namespace maniple
