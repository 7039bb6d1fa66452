// The one way to write a test with several ranks:
//
//   run_ranks({.n = 4, .as = As::processes, .transport = TransportKind::shm}, [](Rank& r) {
//     int one = 1;
//     r.world->all_reduce(buffer_of(one));
//     EXPECT_EQ(one, 4);
//   });
//
// The run owns the store, ports, temporary directories, namespaces and the deadline. The first rank that throws or
// fails an assertion ends the run for all, and its text comes first. Afterwards nothing may be left: no process, no
// descriptor, no thread, no file; a leak fails the test.
//
// threads     ranks are threads of this process with a MemoryStore in common
// processes   ranks are this program started again with a filter for the current test; the child runs the same test
//             body, skips the calls of run_ranks before its own, runs the lambda as its rank and exits. So a test's
//             body must reach its n-th call by itself in every process: use EXPECT (not ASSERT) between two calls.
// netns       the same, with ranks spread over hosts that are network namespaces joined by a bridge; needs root, is
//             skipped with a reason otherwise
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "harness/rank.h"
#include <maniple/comm/options.h>

namespace maniple::harness {

enum class As { threads, processes, netns };
const char* to_string(As as) noexcept;

struct RunOptions {
  int n = 2;
  As as = As::threads;
  TransportKind transport = TransportKind::automatic;
  std::string algorithm = {};
  std::string backend = {};  ///< empty: that of MANIPLE_TEST_BACKEND, or native

  /// False: the lambda initialises by itself, with `r.init()` or with `r.init_options()` changed at will.
  bool init = true;
  /// Default limit of the ranks' operations; below `limit`, so that a stuck operation is reported by itself.
  Seconds timeout = std::chrono::seconds(30);
  /// Limit of the whole run.
  Seconds limit = std::chrono::seconds(60);
  /// Processes have a tcp:// rendezvous on loopback instead of file://. (Those in namespaces always use tcp://.)
  bool rendezvous_by_tcp = false;

  int hosts = 2;         ///< netns: ranks are split over so many hosts, in blocks
  double rate_mbit = 0;  ///< netns: every host's link is shaped to this rate; 0: not shaped
  double queue_ms = 50;  ///< netns: what a shaped link keeps at most of what it cannot send yet

  /// Ranks that may end by a signal or with an error. A fault that kills or stops a rank allows it by itself.
  std::vector<int> expect_dead = {};
  Fault fault = {};  ///< happens in `r.step()`
  std::vector<std::pair<std::string, std::string>> env = {};
};

struct RunResult {
  struct Ended {
    bool finished = false;  ///< the lambda returned
    int exit_code = 0;      ///< of a process
    int signal = 0;         ///< that ended the process
  };
  std::vector<Ended> ended;                                   ///< by rank; empty when the run did not take place here
  std::map<std::string, std::map<int, std::string>> reports;  ///< key -> rank -> what it reported last
  Seconds elapsed{0};

  /// What ranks reported under a key; empty when none did.
  std::map<int, std::string> texts(const std::string& key) const;
  std::map<int, double> numbers(const std::string& key) const;

  /// False in a child that only passes by on its way to a later call, and after a skip: check nothing then.
  explicit operator bool() const noexcept { return !ended.empty(); }
};

RunResult run_ranks(const RunOptions& options, const std::function<void(Rank&)>& body);

/// MANIPLE_TEST_BACKEND: "native" if unset.
std::string chosen_backend();

/// True in a process that is a rank of some run: expensive preparations of the parent can be left out.
bool is_child() noexcept;

}  // namespace maniple::harness
