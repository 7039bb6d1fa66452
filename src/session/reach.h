// Reaches another rank's control listener in a thread of its own, as dialling blocks and may have to be tried again.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <string>
#include <thread>

#include "net/secure_connection.h"
#include <maniple/comm/deadline.h>

namespace maniple {

class Reach {
 public:
  struct Result {
    SecureConnection connection;   ///< none: it could not be reached
    bool refused = false;  ///< nobody listens there any more
    std::string why;
  };
  struct Task {
    std::chrono::microseconds delay{0};  ///< before the first try
    Deadline::Duration one_try{};        ///< limit of a try
    std::function<SecureConnection(Deadline deadline, int cancel)> dial;
    std::function<bool(double tried_s)> hopeless;  ///< whether to give up, after so many seconds
    std::function<void(Result)> done;              ///< in that thread; not called when it is cancelled
  };
  explicit Reach(Task task);
  ~Reach();  ///< leaves a handshake that is under way a little time, as breaking it off looks like an attack; then cancels

 private:
  void run();

  Task task_;
  UniqueFd cancel_;
  std::atomic<bool> dialling_{false};
  std::promise<void> finished_;
  std::thread thread_;
};

}  // namespace maniple
