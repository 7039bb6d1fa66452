// Runs a test with several ranks:
//
//   run_ranks({.n = 4, .as = As::processes, .transport = TransportKind::shm}, [](Rank& r) {
//     int one = 1;
//     r.world->all_reduce(buffer_of(one));
//     EXPECT_EQ(one, 4);
//   });
//
// The run owns the store, ports, temporary directories, namespaces and the deadline. The first rank that throws or
// fails an assertion ends the run for all ranks, and its text is shown first. A process, descriptor, thread or file
// that is left afterwards fails the test.
//
// threads     Ranks are threads of this process that share a MemoryStore.
// processes   Ranks are new processes of this program with a filter for the current test. A child runs the same test
//             body, skips earlier calls of run_ranks, runs the lambda of its call as its rank and exits. The test's
//             body must therefore reach its n-th call in every process: use EXPECT (not ASSERT) between two calls.
// netns       Like processes, with ranks spread over hosts that are network namespaces joined by a bridge. Needs root;
//             otherwise the test is skipped with a reason.
#pragma once

#include <cstdint>
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
  std::string backend = {};  ///< empty: MANIPLE_TEST_BACKEND, or else native

  /// False: the lambda initialises by itself, with `r.init()` or with modified `r.init_options()`.
  bool init = true;
  /// Default timeout of the ranks' operations. Below `limit`, so that a stuck operation reports its own timeout.
  Seconds timeout = std::chrono::seconds(30);
  /// Time limit of the whole run.
  Seconds limit = std::chrono::seconds(60);
  /// processes: rendezvous through tcp:// on loopback instead of file://. (netns always uses tcp://.)
  bool rendezvous_by_tcp = false;

  int hosts = 2;         ///< netns: number of hosts; ranks are assigned in blocks
  double rate_mbit = 0;  ///< netns: rate of every host's link; 0: unshaped
  double queue_ms = 50;  ///< netns: maximum queueing delay of a shaped link
  bool lossy = false;    ///< netns: the link between hosts loses packets when Rank::lose_packets says so

  /// Ranks that may end by a signal or with an error. A fault that kills or stops a rank allows that implicitly.
  std::vector<int> expect_dead = {};
  Fault fault = {};  ///< triggered in `r.step()`
  std::vector<std::pair<std::string, std::string>> env = {};
};

struct RunResult {
  struct Ended {
    bool finished = false;  ///< the lambda returned
    int exit_code = 0;      ///< of a process
    int signal = 0;         ///< the signal that ended the process
  };
  std::vector<Ended> ended;                                   ///< by rank; empty if the run did not take place here
  std::map<std::string, std::map<int, std::string>> reports;  ///< key -> rank -> last reported value
  Seconds elapsed{0};
  std::uint64_t packets_lost = 0;  ///< netns with `lossy`

  /// The values that ranks reported under a key; empty if none did.
  std::map<int, std::string> texts(const std::string& key) const;
  std::map<int, double> numbers(const std::string& key) const;

  /// False in a child on its way to a later call, and after a skip. Do not check results then.
  explicit operator bool() const noexcept { return !ended.empty(); }
};

RunResult run_ranks(const RunOptions& options, const std::function<void(Rank&)>& body);

/// MANIPLE_TEST_BACKEND: "native" if unset.
std::string chosen_backend();

/// True in a process that is a rank of some run and can omit the parent's expensive preparations.
bool is_child() noexcept;

}  // namespace maniple::harness
