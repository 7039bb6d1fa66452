// Curves for TensorBoard, without Python: the names are those of torch.utils.tensorboard.
//
//   maniple::SummaryWriter writer("runs/first");
//   writer.add_scalar("train/loss", loss.item<double>(), step);
//   writer.add_text("arguments", "lr 0.1", 0);
//
// and then, with TensorBoard from where you have it:  tensorboard --logdir runs
//
// The folder is made if need be, with a file events.out.tfevents.TIME.HOST.PID.N in it; several files in a folder are
// one run, so a training that is resumed goes on in the same folder. Only rank 0 writes; elsewhere the calls cost
// nothing, so they need no `if`. (But reading a number from a tensor costs: ask is_open() before.)
//
// Each event is one write(2): curves are seen at once, and a process that is killed leaves a file that is whole. A disk
// that is full, or fails otherwise, costs events and one warning, and never the training: what does not fit is dropped
// and the file stays readable; when there is room again, writing goes on. last_error() keeps the reason.
//
// Any thread. The constructor throws SystemError when the folder or the file cannot be made; after it, only mistakes
// throw (an empty tag: InvalidArgument).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

struct SummaryWriterOptions {
  bool only_rank_0 = true;  ///< the rank in the default group; without one, every process writes
  /// When a run is resumed at this step: has TensorBoard drop what earlier files hold for this step and later ones.
  std::optional<std::int64_t> purge_step = {};
  std::string filename_suffix = "";
};

class SummaryWriter {
 public:
  explicit SummaryWriter(const std::string& log_dir, SummaryWriterOptions options = {});
  ~SummaryWriter();
  SummaryWriter(const SummaryWriter&) = delete;
  SummaryWriter& operator=(const SummaryWriter&) = delete;

  /// Kept as float32, as TensorBoard does. NaN and infinities are written as they are. `walltime`: seconds since 1970;
  /// default: now.
  void add_scalar(std::string_view tag, double value, std::int64_t global_step, std::optional<double> walltime = {});

  /// A text, shown as Markdown.
  void add_text(std::string_view tag, std::string_view text, std::int64_t global_step,
                std::optional<double> walltime = {});

  /// Returns when the events are on the disk, so that they survive a power cut. (A killed process loses nothing
  /// anyway.)
  void flush();
  void close();  ///< flushes; later calls do nothing

  bool is_open() const noexcept;  ///< whether events of this rank are written
  std::string log_dir() const;
  std::string path() const;        ///< of the file; empty where nothing is written
  std::string last_error() const;  ///< why the latest event was not written; empty if it was

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
  std::string log_dir_;
};

}  // namespace maniple
