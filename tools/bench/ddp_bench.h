// `maniple bench ddp`: the cost of gradient averaging in a training step, for Maniple and PyTorch in one run.
//
// Separate programs (ddp_worker, ddp_torch.py) do the work, because `maniple` itself does not link LibTorch. The
// systems are measured one after the other for each model, so that both find the machine in the same state.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tools/bench/process_set.h"
#include "tools/bench/report.h"
#include "tools/bench/system.h"

namespace maniple::bench {

/// The result for one system, model and number of ranks.
struct DdpRow {
  std::string system;  ///< "maniple", "torch"
  std::string model;
  int ranks = 0;
  double nosync_ms = 0;    ///< a step without averaging, all ranks running
  double ddp_ms = 0;       ///< a step with averaging
  double efficiency = 0;   ///< nosync_ms / ddp_ms
  double peak_rss_mb = 0;  ///< maximum over the ranks
  std::string overlap;     ///< of averaging with backward: "none", "inline", "thread"
};

/// The options of `maniple bench ddp`.
struct DdpRequest {
  std::vector<std::string> models;  ///< empty: all
  std::vector<int> ranks = {2};
  int iterations = 0;  ///< steps of each kind; 0: as `seconds` allow
  double seconds = 5;  ///< time for the steps of each kind
  double timeout_s = 300;
  int repeat = 1;  ///< measurements of each; the one with the median efficiency counts
  bool torch = true;
};

/// The models to train: `names`, or all if `names` is empty. Throws InvalidArgument for an unknown model.
std::vector<std::string> checked_models(const std::vector<std::string>& names);

class DdpBench {
 public:
  DdpBench(const Testbed& testbed, const SignalWatch& watch, std::function<void(const std::string&)> progress)
      : testbed_(testbed), watch_(watch), progress_(std::move(progress)) {}

  /// Throws Unsupported when this build lacks ddp_worker. A missing or failing peer is reported in warnings().
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
