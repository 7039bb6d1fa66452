// `maniple bench gpu`: collectives among ranks that share a GPU, and training on it, for Maniple, NCCL and PyTorch in
// one run.
//
// The work is done by programs of their own (gpu_worker, limit_gpu, ddp_gpu_worker, ddp_gpu_torch.py), as `maniple`
// itself needs neither CUDA nor LibTorch. They are started by `maniple run`, with --share-gpu where MPS is asked for,
// and so as users start theirs.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/bench/process_set.h"
#include "tools/bench/report.h"
#include "tools/bench/system.h"

namespace maniple::bench {

/// One run of one program, which gives one row or several.
struct GpuMeasurement {
  enum class Program { collectives, limit, ddp, torch };

  Program program = Program::collectives;
  std::string subject;           ///< of collectives: the backend; of training: the model
  int ranks = 1;                 ///< all on one GPU
  bool mps = false;              ///< with NVIDIA's Multi-Process Service
  bool by_default = true;        ///< false: only when --only picks it
  std::string backend = "cuda";  ///< of ddp

  std::string name() const;  ///< "all_reduce cuda, 2 ranks, MPS": what --only is matched with
};

/// What was measured, or why it was not.
struct GpuRow {
  std::string what;    ///< "all_reduce"; "resnet50", "gpt2", "mlp"
  std::string system;  ///< "cuda", "nccl", "native", "bare NCCL", "limit"; "maniple", "torch"
  std::string kind;    ///< "registered", "ordinary"; "plain", "DDP", "DDP best"
  int ranks = 0;
  bool mps = false;
  std::uint64_t bytes = 0;  ///< of a collective
  double us = 0;            ///< of one operation, or step, back to back
  double enqueue_us = 0;    ///< of the host, for one operation
  double items = 0;         ///< of a step, on all ranks: images, tokens, samples
  std::string note;         ///< backend, version, optimizer
  std::string missing;      ///< not empty: not measured, and this is why

  double gigabytes_per_second() const { return us > 0 ? static_cast<double>(bytes) / us / 1e3 : 0; }
  double items_per_second() const { return us > 0 ? items / us * 1e6 : 0; }
};

/// Everything that can be measured, in order.
std::vector<GpuMeasurement> gpu_measurements();
/// Those whose names contain `only`, in which *, ? and [...] mean what they mean to a shell; those of a default run
/// when it is empty. Throws InvalidArgument when there is none.
std::vector<GpuMeasurement> picked_measurements(const std::string& only);

/// Throws InvalidArgument for what is no row.
GpuRow parse_gpu_row(std::string_view json);

/// One of the figures that the project wants of itself, and what became of it.
struct GpuGoal {
  std::string what;      ///< "resnet50, DDP of 1 rank over the plain step"
  std::string measured;  ///< "+0.8 %"; empty: not measured
  std::string goal;      ///< "at most 1 %"
  std::string beside;    ///< what the peers need: "PyTorch +28.0 %, best +14.6 %"
  bool reached = false;
};
std::vector<GpuGoal> gpu_goals(const std::vector<GpuRow>& rows);

std::string gpu_table_header();
/// `rows`: those so far, among which its plain step is looked for.
std::string gpu_table_line(const GpuRow& row, const std::vector<GpuRow>& rows);
std::string gpu_goals_table(const std::vector<GpuGoal>& goals);
std::string gpu_report_text(const Machine& machine, const std::string& gpu, const std::vector<GpuRow>& rows);

class GpuBench {
 public:
  GpuBench(const Testbed& testbed, const SignalWatch& watch, std::function<void(const std::string&)> progress)
      : testbed_(testbed), watch_(watch), progress_(std::move(progress)) {}

  /// Throws InvalidArgument when there is no GPU. What is missing or fails is a row that says so, and the others go on.
  /// `on_row` gets each row and those before it.
  std::vector<GpuRow> run(const std::vector<GpuMeasurement>& list,
                          const std::function<void(const GpuRow&, const std::vector<GpuRow>&)>& on_row);
  bool failed() const noexcept { return failed_; }          ///< something that is there did not work
  const std::string& gpu() const noexcept { return gpu_; }  ///< its name, as CUDA has it
  const std::vector<std::string>& errors() const noexcept { return errors_; }

 private:
  std::string missing(const GpuMeasurement& one);  ///< what it would need
  ChildSpec process(const GpuMeasurement& one) const;
  std::vector<GpuRow> measure(const GpuMeasurement& one);

  const Testbed& testbed_;
  const SignalWatch& watch_;
  std::function<void(const std::string&)> progress_;
  std::string device_;  // for CUDA_VISIBLE_DEVICES
  std::string gpu_;
  std::string python_, nccl_folder_;
  std::vector<std::string> errors_;
  bool failed_ = false;
};

}  // namespace maniple::bench
