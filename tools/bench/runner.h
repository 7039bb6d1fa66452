// Plans and runs the measurements of `maniple bench`.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tools/bench/process_set.h"
#include "tools/bench/system.h"
#include "tools/bench/virtual_network.h"
#include "tools/bench/work_item.h"

namespace maniple::bench {

inline constexpr int kMaxRanks = 256;

/// The options of one run of `maniple bench`.
struct BenchRequest {
  std::vector<std::string> operations;
  std::vector<int> ranks = {2};
  std::vector<std::uint64_t> sizes;
  std::vector<std::string> dtypes = {"float32"};
  std::string reduce = "sum";
  std::vector<std::string> buffers = {"registered", "ordinary"};
  std::vector<std::string> transports = {"auto"};
  std::vector<std::string> algorithms = {""};
  bool rewrite = false;
  int iterations = 0;
  int warmup = -1;
  double budget_s = 0.25;
  double timeout_s = 300;
  int hosts = 1;
  std::string link;
  int busy = 0;                                            ///< extra processes that compete for the cores
  std::vector<std::string> systems = {"native", "limit"};  ///< names, in the order of a turn
  int repeat = 1;
};

/// One combination of operation, ranks, dtype and hosts. Its systems are measured in turn, and the whole turn is
/// repeated. The median over repetitions counts, so that a slow minute of the machine does not hit only one system.
struct Block {
  int hosts = 1;
  std::string link;
  int busy = 0;
  int repeat = 1;
  std::vector<WorkItem> items;       ///< one per transport, buffer and algorithm
  std::vector<std::string> systems;  ///< in the order of the turn
};

/// Returns the blocks to measure, in order. Throws InvalidArgument for an invalid name or number.
std::vector<Block> plan_blocks(const BenchRequest& request);

/// Starts the processes of the blocks and collects their rows.
class Runner {
 public:
  /// `progress` gets a short line whenever the next measurement starts; may be empty.
  Runner(const SignalWatch& watch, std::function<void(const std::string&)> progress);

  /// Returns rows ordered by size, then system. `on_row` gets each single measurement at once. A failing system is
  /// reported in warnings() and the others go on, so that a long run is not lost.
  std::vector<Row> run(const Block& block, const std::function<void(const Row&)>& on_row = {});

  /// One core's copying and adding at the given sizes.
  std::vector<Row> core_limits(const std::vector<std::uint64_t>& sizes, double budget_s);

  /// Missing measurements and the reasons, one line each, without duplicates.
  const std::vector<std::string>& warnings() const noexcept { return warnings_; }

  /// A system other than a peer failed.
  bool failed() const noexcept { return failed_; }

  const Testbed& testbed() const noexcept { return testbed_; }

 private:
  void use_hosts(int count, const std::string& rate);
  void add_warning(const std::string& text);
  std::vector<Row> run_item(const System& system, const WorkItem& item, const Block& block, const std::string& progress,
                            const std::function<void(const Row&)>& on_row);

  const SignalWatch& watch_;
  std::function<void(const std::string&)> progress_;
  ScratchDirectory scratch_;
  Testbed testbed_;
  std::optional<VirtualNetwork> network_;
  std::string rate_;
  std::vector<std::string> warnings_;
  bool failed_ = false;
};

}  // namespace maniple::bench
