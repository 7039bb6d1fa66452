// Carries out blocks of a campaign.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/campaign.h"
#include "bench/interrupt.h"
#include "bench/row.h"
#include "bench/system.h"

namespace maniple::bench {

class Runner {
 public:
  /// `progress` gets a short line whenever something else is being measured; may be empty.
  Runner(const InterruptWatch& watch, std::function<void(const std::string&)> progress);

  /// Rows in the order of sizes, then systems. `on_row` is told each single measurement as it comes. A system that
  /// fails is noted in complaints() and the others go on, so that a long run is not lost.
  std::vector<Row> run(const Block& block, const std::function<void(const Row&)>& on_row = {});

  /// One core's copying and adding at the given sizes.
  std::vector<Row> core_limits(const std::vector<std::uint64_t>& sizes, double budget_s);

  /// What did not run and why, one line each, every reason once.
  const std::vector<std::string>& complaints() const noexcept { return complaints_; }

  /// A system other than a peer failed.
  bool failed() const noexcept { return failed_; }

  const Site& site() const noexcept { return site_; }

 private:
  void use_hosts(int count, const std::string& link);
  void complain(const std::string& text);
  std::vector<Row> carry_out(const System& system, const Order& order, const Block& block, const std::string& progress,
                             const std::function<void(const Row&)>& on_row);

  const InterruptWatch& watch_;
  std::function<void(const std::string&)> progress_;
  ScratchDirectory scratch_;
  Site site_;
  std::optional<VirtualHosts> hosts_;
  std::string link_;
  std::vector<std::string> complaints_;
  bool failed_ = false;
};

}  // namespace maniple::bench
