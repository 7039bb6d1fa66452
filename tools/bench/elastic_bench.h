// `maniple bench elastic`: how long an elastic job takes to go on when a rank is killed and when its replacement joins,
// and what --elastic costs without a fault.
//
// elastic_faults_worker does the training under `maniple run`, and records what happens and when
// (tools/bench/elastic_event.h).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tools/bench/elastic_event.h"
#include "tools/bench/process_set.h"
#include "tools/bench/system.h"

namespace maniple::bench {

/// The middle and the extremes of several measurements.
struct Spread {
  explicit Spread(std::vector<double> values);  ///< at least one
  double median = 0, min = 0, max = 0;
  int count = 0;
};

/// The seconds between two steps, for each two successive steps on `ranks` ranks.
std::vector<double> step_times(const std::vector<ElasticEvent>& events, int ranks);

/// For each kill, the seconds until the survivors have committed another step, minus the median time of such a step.
std::vector<double> times_to_go_on(const std::vector<ElasticEvent>& events);

/// For each replacement, the seconds from its Trainer::fit() until its first step is committed, minus the median time
/// of such a step.
std::vector<double> times_to_join(const std::vector<ElasticEvent>& events);

class ElasticBench {
 public:
  /// A line of the table, and the same as a JSON object.
  using RowSink = std::function<void(const std::string& line, const nlohmann::ordered_json& row)>;

  ElasticBench(const Testbed& testbed, const SignalWatch& watch, double timeout_s, RowSink on_row)
      : testbed_(testbed), watch_(watch), timeout_s_(timeout_s), on_row_(std::move(on_row)) {}

  /// Kills of one of 4 ranks, and trainings of `ranks` ranks and `seconds` each with and without --elastic in turn.
  void run(int ranks, double seconds);

 private:
  void measure_faults(const std::string& model);
  void measure_overhead(const std::string& model, int ranks, double seconds);
  std::vector<ElasticEvent> events_of(const std::string& model, int ranks, bool elastic, int faults, double seconds);

  const Testbed& testbed_;
  const SignalWatch& watch_;
  double timeout_s_;
  RowSink on_row_;
};

}  // namespace maniple::bench
