// Requests to a running job from other processes of its user on this machine, such as `maniple resize`.
//
// The job's coordinator listens on a Unix socket in the folder of the job's record (job_record.h). A request and its
// answer are one packet each.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "comm/base/fork_guard.h"
#include "comm/base/unique_fd.h"
#include "comm/net/poller.h"

namespace maniple::launch {

struct ControlAnswer {
  bool accepted = false;
  std::string text = {};
};

class JobControl {
 public:
  using Handler = std::function<ControlAnswer(std::string_view request)>;

  /// Errors never fail the job; they are logged at debug level.
  JobControl(Poller& poller, const std::string& job, Handler handler) noexcept;
  ~JobControl();
  JobControl(const JobControl&) = delete;
  JobControl& operator=(const JobControl&) = delete;

 private:
  void accept_all();
  void serve(int fd);

  Poller& poller_;
  Handler handler_;
  ForkGuard guard_;  // a forked child has a copy of this object but must not remove the socket
  std::string directory_, name_;
  UniqueFd listener_;
  std::map<int, UniqueFd> connections_;
};

/// The name of a job's socket in a job directory.
std::string control_name(const std::string& job);

/// Sends a request to a job of this user on this machine, and returns its answer. `job`: its name, or its launcher's
/// pid. Throws InvalidArgument if there is no such job or it takes no requests; SystemError; Timeout.
ControlAnswer ask_job(const std::string& job, std::string_view request);

}  // namespace maniple::launch
