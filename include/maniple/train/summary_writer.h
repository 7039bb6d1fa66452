// Writes TensorBoard logs without Python. Names follow torch.utils.tensorboard.
//
//   maniple::SummaryWriter writer("runs/first");
//   writer.add_scalar("train/loss", loss.item<double>(), step);
//   writer.add_text("arguments", "lr 0.1", 0);
//
// To view them:  tensorboard --logdir runs
//
// The folder is created if missing and gets a file events.out.tfevents.TIME.HOST.PID.N. Several files in a folder form
// one run, so resumed training continues in the same folder. Only rank 0 writes; on other ranks the calls cost nothing
// and need no `if`. (Reading a number from a tensor does cost time: check is_open() first.)
//
// Each event is one write(2): curves are visible at once, and a killed process leaves a complete file. A full or
// failing disk costs events and one warning, but never ends training: events that do not fit are dropped, and the file
// stays readable. Writing resumes when there is space again. last_error() returns the reason.
//
// Threads: any thread. Errors: the constructor throws SystemError if the folder or the file cannot be created.
// Afterwards only wrong arguments throw (an empty tag: InvalidArgument).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct SummaryWriterOptions {
  bool only_rank_0 = true;  ///< rank in the default group; without one, every process writes
  /// For a run resumed at this step: TensorBoard discards events of earlier files from this step on.
  std::optional<std::int64_t> purge_step = {};
  std::string filename_suffix = "";
};

class SummaryWriter {
 public:
  explicit SummaryWriter(const std::string& log_dir, SummaryWriterOptions options = {});
  ~SummaryWriter();
  SummaryWriter(const SummaryWriter&) = delete;
  SummaryWriter& operator=(const SummaryWriter&) = delete;

  /// Stored as float32, as in TensorBoard. NaN and infinities are written unchanged. `walltime`: seconds since 1970;
  /// default: now.
  void add_scalar(std::string_view tag, double value, std::int64_t global_step, std::optional<double> walltime = {});

  /// Adds a text, shown as Markdown.
  void add_text(std::string_view tag, std::string_view text, std::int64_t global_step,
                std::optional<double> walltime = {});

  /// Waits until the events are on the disk, so that they survive a power failure. (A killed process does not lose
  /// events.)
  void flush();
  void close();  ///< flushes; later calls do nothing

  bool is_open() const noexcept;  ///< whether this rank writes events
  std::string log_dir() const;
  std::string path() const;        ///< of the file; empty if this rank does not write
  std::string last_error() const;  ///< why the latest event was not written; empty on success

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
  std::string log_dir_;
};

}  // namespace maniple
