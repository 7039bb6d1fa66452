// `maniple bench ddp`: what averaging gradients adds to a training step, for Maniple and for PyTorch in the same run.
//
// The work is done by programs of their own (ddp_worker, ddp_torch.py), because `maniple` itself does not link
// LibTorch. Each model is measured by one system after the other, so that both find the machine in the same state.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tools/bench/process_set.h"
#include "tools/bench/report.h"
#include "tools/bench/system.h"

namespace maniple::bench {

/// Result of one system, model and number of ranks.
struct DdpRow {
  std::string system;  ///< "maniple", "torch"
  std::string model;
  int ranks = 0;
  double nosync_ms = 0;    ///< of a step without averaging, all ranks running
  double ddp_ms = 0;       ///< of a step with it
  double efficiency = 0;   ///< nosync_ms / ddp_ms
  double peak_rss_mb = 0;  ///< of the largest rank
  std::string overlap;     ///< with backward: "none", "inline", "thread"
};

/// What `maniple bench ddp` was asked to measure.
struct DdpRequest {
  std::vector<std::string> models;  ///< empty: all
  std::vector<int> ranks = {2};
  int iterations = 0;  ///< steps of each kind; 0: as many as fit
  double seconds = 5;  ///< for the steps of each kind
  double timeout_s = 300;
  int repeat = 1;  ///< times each is measured; the median efficiency counts
  bool torch = true;
};

/// The models to train: `names`, or all when it is empty. Throws InvalidArgument for one that does not exist.
std::vector<std::string> checked_models(const std::vector<std::string>& names);

class DdpBench {
 public:
  DdpBench(const Testbed& testbed, const SignalWatch& watch, std::function<void(const std::string&)> progress)
      : testbed_(testbed), watch_(watch), progress_(std::move(progress)) {}

  /// Throws Unsupported when this build has no ddp_worker. A peer that is missing or fails is noted in warnings().
  std::vector<DdpRow> run(const DdpRequest& request, const std::function<void(const DdpRow&)>& on_row);
  const std::vector<std::string>& warnings() const noexcept { return warnings_; }
  bool failed() const noexcept { return failed_; }

 private:
  std::string python_with_torch();
  DdpRow measure(const std::vector<std::string>& program, const std::string& system, const std::string& model,
                 int ranks, const DdpRequest& request);
  void add_warning(const std::string& text);

  const Testbed& testbed_;
  const SignalWatch& watch_;
  std::function<void(const std::string&)> progress_;
  std::vector<std::string> warnings_;
  bool failed_ = false;
};

DdpRow parse_ddp_row(const std::string& json);  ///< throws InvalidArgument
std::string ddp_report_text(const Machine& machine, const std::vector<DdpRow>& rows);
std::string ddp_table_header();
std::string ddp_table_line(const DdpRow& row);

}  // namespace maniple::bench
