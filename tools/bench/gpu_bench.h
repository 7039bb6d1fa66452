// `maniple bench gpu`: collectives among ranks that share a GPU, and training on the GPU, for Maniple, NCCL and PyTorch
// in one run.
//
// Separate programs (gpu_worker, limit_gpu, ddp_gpu_worker, ddp_gpu_torch.py) do the work, because `maniple` itself
// needs neither CUDA nor LibTorch. They are started as users start theirs: by `maniple run`, with --share-gpu for MPS.
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

/// One run of one program, which yields one or more rows.
struct GpuMeasurement {
  enum class Program { collectives, limit, ddp, torch };

  Program program = Program::collectives;
  std::string subject;           ///< collectives: the backend; training: the model
  int ranks = 1;                 ///< all on one GPU
  bool mps = false;              ///< with NVIDIA's Multi-Process Service
  bool by_default = true;        ///< false: only if --only selects it
  std::string backend = "cuda";  ///< for ddp

  std::string name() const;  ///< "all_reduce cuda, 2 ranks, MPS": --only is matched against it
};

/// A result, or the reason why it is missing.
struct GpuRow {
  std::string what;    ///< "all_reduce"; "resnet50", "gpt2", "mlp"
  std::string system;  ///< "cuda", "nccl", "native", "bare NCCL", "limit"; "maniple", "torch"
  std::string kind;    ///< "registered", "ordinary"; "plain", "DDP", "DDP best"
  int ranks = 0;
  bool mps = false;
  std::uint64_t bytes = 0;  ///< of a collective
  double us = 0;            ///< time of one operation or step, back to back
  double enqueue_us = 0;    ///< host time for one operation
  double items = 0;         ///< images, tokens or samples per step on all ranks
  std::string note;         ///< backend, version, optimizer
  std::string missing;      ///< why it was not measured; empty: it was

  double gigabytes_per_second() const { return us > 0 ? static_cast<double>(bytes) / us / 1e3 : 0; }
  double items_per_second() const { return us > 0 ? items / us * 1e6 : 0; }
};

/// All measurements, in order.
std::vector<GpuMeasurement> gpu_measurements();
/// The measurements whose names contain `only`, which may use the shell's *, ? and [...]. If `only` is empty, the
/// measurements of a default run. Throws InvalidArgument if none matches.
std::vector<GpuMeasurement> picked_measurements(const std::string& only);

/// Throws InvalidArgument if `json` is not a row.
GpuRow parse_gpu_row(std::string_view json);

/// A performance goal of the project and its result.
struct GpuGoal {
  std::string what;      ///< "resnet50, DDP of 1 rank over the plain step"
  std::string measured;  ///< "+0.8 %"; empty: not measured
  std::string goal;      ///< "at most 1 %"
  std::string beside;    ///< the peers' results: "PyTorch +28.0 %, best +14.6 %"
  bool reached = false;
};
std::vector<GpuGoal> gpu_goals(const std::vector<GpuRow>& rows);

std::string gpu_table_header();
/// `rows`: the rows so far, which include the row's plain step.
std::string gpu_table_line(const GpuRow& row, const std::vector<GpuRow>& rows);
std::string gpu_goals_table(const std::vector<GpuGoal>& goals);
std::string gpu_report_text(const Machine& machine, const std::string& gpu, const std::vector<GpuRow>& rows);

class GpuBench {
 public:
  GpuBench(const Testbed& testbed, const SignalWatch& watch, std::function<void(const std::string&)> progress)
      : testbed_(testbed), watch_(watch), progress_(std::move(progress)) {}

  /// Throws InvalidArgument when there is no GPU. A missing or failing program yields a row that reports it, and the
  /// other measurements go on. `on_row` gets each row and the rows before it.
  std::vector<GpuRow> run(const std::vector<GpuMeasurement>& list,
                          const std::function<void(const GpuRow&, const std::vector<GpuRow>&)>& on_row);
  bool failed() const noexcept { return failed_; }          ///< an installed program other than PyTorch's failed
  const std::string& gpu() const noexcept { return gpu_; }  ///< the GPU's name, as CUDA reports it
  const std::vector<std::string>& errors() const noexcept { return errors_; }

 private:
  std::string missing(const GpuMeasurement& one);  ///< missing requirements; empty: none
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
