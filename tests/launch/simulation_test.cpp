// The coordinator in simulated jobs: whatever happens, and in whatever order, its rules hold (simulated_job.h).
#include <gtest/gtest.h>

#include <cstdlib>

#include "harness/sanitizers.h"
#include "launch/simulated_job.h"

namespace maniple::launch {
namespace {

/// SIMULATION_SEED=N repeats the job of one seed and prints what happens.
void expect_rules_hold(std::uint64_t first, std::uint64_t count) {
  const char* chosen = std::getenv("SIMULATION_SEED");
  if (chosen != nullptr) {
    first = std::strtoull(chosen, nullptr, 10);
    count = 1;
  }
  int faults = 0;
  for (std::uint64_t seed = first; seed < first + count && faults < 5; ++seed) {
    SimulatedJob job(seed);
    if (chosen != nullptr) job.record();
    if (const std::string rule = job.run(); !rule.empty()) {
      ++faults;
      ADD_FAILURE() << "seed " << seed << ": " << rule << "\nrepeat it with SIMULATION_SEED=" << seed;
    }
    for (const std::string& line : job.log()) std::printf("%s\n", line.c_str());
  }
}

TEST(Simulation, TheRulesHoldInEveryJob) { expect_rules_hold(1, harness::kSanitized ? 5'000 : 100'000); }

TEST(Simulation, DISABLED_TheRulesHoldInMillionsOfJobs) { expect_rules_hold(1'000'000, 5'000'000); }

}  // namespace
}  // namespace maniple::launch
