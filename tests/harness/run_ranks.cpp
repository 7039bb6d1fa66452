#include "harness/run_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "harness/device_memory.h"
#include "harness/failures.h"
#include "harness/lossy_link.h"
#include "harness/modes.h"
#include "harness/sanitizers.h"
#include "tools/bench/virtual_network.h"

namespace maniple::harness {

const char* to_string(As as) noexcept {
  switch (as) {
    case As::threads: return "threads";
    case As::processes: return "processes";
    case As::netns: return "netns";
  }
  return "?";
}

std::map<int, std::string> RunResult::texts(const std::string& key) const {
  const auto found = reports.find(key);
  return found == reports.end() ? std::map<int, std::string>{} : found->second;
}

std::map<int, double> RunResult::numbers(const std::string& key) const {
  std::map<int, double> values;
  for (const auto& [rank, text] : texts(key)) values[rank] = std::strtod(text.c_str(), nullptr);
  return values;
}

InitOptions init_options(const RunOptions& options, int rank) {
  InitOptions init;
  init.rank = rank;
  init.world_size = options.n;
  init.timeout = options.timeout * kSlowdown;
  init.transport = options.transport;
  init.algorithm = options.algorithm;
  init.backend = options.backend.empty() ? chosen_backend() : options.backend;
  return init;
}

std::string chosen_backend() {
  const char* name = std::getenv("MANIPLE_TEST_BACKEND");
  return name != nullptr && *name != '\0' ? name : "native";
}

int host_of(const RunOptions& options, int rank) {
  return options.as == As::netns ? static_cast<int>(static_cast<long>(rank) * options.hosts / options.n) : 0;
}

bool may_die(const RunOptions& options, int rank) {
  return (options.fault.ends_rank() && options.fault.rank == rank) ||
         std::find(options.expect_dead.begin(), options.expect_dead.end(), rank) != options.expect_dead.end();
}

bool is_child() noexcept { return child_mode().has_value(); }

namespace {

// GTEST_SKIP returns from the function that uses it, so it needs a function of its own outside the test's body.
void skip(const std::string& reason) { GTEST_SKIP() << reason; }

}  // namespace

RunResult run_ranks(const RunOptions& options, const std::function<void(Rank&)>& body) {
  const int run_index = next_run_index();
  if (const auto& mode = child_mode()) {
    if (mode->run_index != run_index) return {};
    run_as_child(options, *mode, body);
  }
  // On a GPU, LibTorch runs the backward passes of all threads in one thread, which ranks must not share.
  const bool as_threads = options.as == As::threads && test_device().is_cpu();
  if (as_threads) return run_as_threads(options, body);
  if (options.as == As::netns) {
    if (const std::string reason = bench::VirtualNetwork::why_not(); !reason.empty()) {
      skip("no network namespaces: " + reason);
      return {};
    }
    if (const std::string reason = options.lossy ? LossyLink::why_not() : ""; !reason.empty()) {
      skip("no lossy link: " + reason);
      return {};
    }
  }
  return run_as_processes(options, run_index);
}

}  // namespace maniple::harness
