// Reports failed assertions of any thread as they happen, so that a run can end at the first one.
#pragma once

#include <functional>
#include <string>

namespace maniple::harness {

struct Failure {
  std::string file;
  int line = -1;
  std::string text;
};

/// Until destroyed, calls `sink` for every failed assertion and every skip of this process. The sink runs under
/// GoogleTest's lock and must not assert.
class FailureWatch {
 public:
  using Sink = std::function<void(const Failure& failure, bool skip)>;
  explicit FailureWatch(Sink sink);
  ~FailureWatch();
  FailureWatch(const FailureWatch&) = delete;
  FailureWatch& operator=(const FailureWatch&) = delete;
};

/// Describes the exception being handled: "PeerLost: [all_reduce #12 ...] ...".
std::string describe_current_exception();

/// Installs the listener that feeds the watches and counts the runs of each test. Called once, by main.
void install_listener();

/// The number of the current test's next run, counted from 0.
int next_run_index();

}  // namespace maniple::harness
