// Detects ranks that wait for each other in different calls: compares all ranks' calls while one of them waits.
//
// Ranks compare their calls where they meet: in the arena once all have published, on the mesh in every frame. Ranks
// whose calls differ need not meet. One rank may wait in its host's arena and another for a frame from a third rank, or
// both wait for a third rank that waits for one of them elsewhere. So each rank checks some times a second whether a
// call in its groups has been running for a while; the calls themselves do nothing for this. It then requests a
// comparison of all calls with the same number, at growing intervals while the call runs. Different calls under one
// number are always an error; a rank that has not made the call is only late.
//
// The failure detector's leader compares (mismatch_report.h). Ranks that are threads of one process have no failure
// detector; they find each other in a table.
//
// The flight recorder has the calls: without it (MANIPLE_RECORDER=0) nothing is found here.
//
// Runs in the event loop's thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/net/event_loop.h"
#include "comm/session/wait_report.h"

namespace maniple {

class CallWatch : public std::enable_shared_from_this<CallWatch> {
 public:
  struct Callbacks {
    std::shared_ptr<EventLoop> loop;
    int rank = 0;
    std::uint64_t world = 0;
    std::function<std::vector<WaitReports::Group>()> groups;
    /// Has the leader compare the members' calls. Empty if all ranks are in this process.
    std::function<void(const std::string& group, std::uint64_t seq)> compare;
    /// Returns this rank's call; empty if it has not called yet.
    std::function<RankCall(const std::string& group, std::uint64_t seq)> called;
    std::function<void(const detector::Abort& abort)> aborted;  ///< the group has failed, in all ranks
  };

  static std::shared_ptr<CallWatch> start(Callbacks callbacks);
  void stop();

 private:
  struct Asked {  // about a group's running call
    std::uint64_t seq = 0;
    double next_s = 0;
  };
  explicit CallWatch(Callbacks callbacks) : callbacks_(std::move(callbacks)) {}
  void check();
  void compare_here(const WaitReports::Group& group, std::uint64_t seq);

  Callbacks callbacks_;
  bool stopped_ = false;
  std::map<std::string, Asked> asked_;
};

}  // namespace maniple
