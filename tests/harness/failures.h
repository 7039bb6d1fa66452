// Failed assertions, as they happen, in any thread: who listens can end a run at the first one.
#pragma once

#include <functional>
#include <string>

namespace maniple::harness {

struct Failure {
  std::string file;
  int line = -1;
  std::string text;
};

/// While it lives, `sink` gets every failed assertion and every skip of this process. It runs under GoogleTest's lock:
/// it must not assert.
class FailureWatch {
 public:
  using Sink = std::function<void(const Failure& failure, bool skip)>;
  explicit FailureWatch(Sink sink);
  ~FailureWatch();
  FailureWatch(const FailureWatch&) = delete;
  FailureWatch& operator=(const FailureWatch&) = delete;
};

/// "PeerLost: [all_reduce #12 ...] ..." of the exception being handled.
std::string describe_current_exception();

/// To be called once, by main: the listener that feeds the watches and counts the runs of each test.
void install_listener();

/// Number of the next run of the current test, from 0.
int next_run_index();

}  // namespace maniple::harness
