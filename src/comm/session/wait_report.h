// Logs which ranks an operation waits for when it takes long because a live rank does not make the call. One rank logs
// for each group, after some seconds and then at growing intervals.
//
// About once a second each rank checks whether a call in its groups has been running for too long; the calls themselves
// do nothing for this. If so, it notifies the failure detector's leader, which queries the group's ranks and logs one
// line. Ranks that are threads of one process have no failure detector; they find each other in a table. A message
// (send, recv) already names its peer, so its rank logs that itself.
//
// Runs in the event loop's thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/net/event_loop.h"
#include "comm/session/detector_message.h"

namespace maniple {

/// This rank's last call in a group.
struct CallProgress {
  std::uint64_t seq = 0;  ///< 0: none yet
  bool running = false;
  double seconds = 0;  ///< since the call began if it is running, otherwise since it ended
  std::string call;    ///< "all_reduce #12 float32[4] sum at train.cpp:40"
};

/// This rank's longest-waiting message in a group.
struct MessageWait {
  Deadline::Clock::time_point since{};
  std::string call;  ///< "[recv from rank 1 tag 7 world rank 0/2]"; empty: no message waits
  std::string whom;  ///< "rank 1 (pid 4711 on node7)"
};

class WaitReports : public std::enable_shared_from_this<WaitReports> {
 public:
  struct Group {
    std::string name;
    std::vector<int> members;  ///< global ranks
    std::function<CallProgress()> progress;
    MessageWait message;
    bool compares_arguments = true;  ///< see GroupLink
  };
  struct Callbacks {
    std::shared_ptr<EventLoop> loop;
    int rank = 0;
    std::uint64_t world = 0;
    double after_s = 10;
    std::function<std::vector<Group>()> groups;
    std::function<std::string(int rank)> describe;
    /// Send to the leader, and from the leader to a rank. Empty if all ranks are in this process.
    std::function<void(const detector::Waiting& message)> send_to_leader;
    std::function<void(int rank, const detector::QueryProgress& message)> ask;
  };

  static std::shared_ptr<WaitReports> start(Callbacks callbacks);
  void stop();

  /// The reply to a query for this rank's progress.
  detector::ProgressReply progress(const detector::QueryProgress& query) const;
  // Called on the leader.
  void on_waiting(const detector::Waiting& message);
  void on_progress_reply(const detector::ProgressReply& answer);

 private:
  struct Logged {  // about a group's running call, or its oldest message
    std::uint64_t seq = 0;
    Deadline::Clock::time_point since{};
    double next_s = 0;
  };
  struct Query {  // on the leader, about a call
    explicit Query(std::uint64_t number = 0) : seq(number) {}
    std::uint64_t seq;
    double pause_s = 0;
    Deadline::Clock::time_point not_before{};
    bool open = false;
    double waited_s = 0;
    std::string call;
    std::map<int, detector::ProgressReply> answers;
    std::vector<int> members;
  };
  explicit WaitReports(Callbacks callbacks) : callbacks_(std::move(callbacks)) {}
  void check();
  void check_call(const Group& group, Logged& logged);
  void check_message(const Group& group, Logged& logged) const;
  void finish(const std::string& group);

  Callbacks callbacks_;
  bool stopped_ = false;
  std::map<std::string, Logged> calls_;
  std::map<std::string, Logged> messages_;
  std::map<std::string, Query> queries_;
};

}  // namespace maniple
