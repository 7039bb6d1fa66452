// One operation's patience: everything it waits for shares one deadline.
#pragma once

#include <maniple/comm/deadline.h>

namespace maniple {

class Patience {
 public:
  explicit Patience(std::chrono::duration<double> limit) : limit_(limit) {}
  explicit Patience(Deadline deadline) : deadline_(deadline), fixed_(true) {}

  /// Taken late: a call that never has to wait never reads the clock.
  Deadline deadline() {
    if (!fixed_) {
      deadline_ = Deadline::after(limit_);
      fixed_ = true;
    }
    return deadline_;
  }

 private:
  std::chrono::duration<double> limit_{};
  Deadline deadline_;
  bool fixed_ = false;
};

}  // namespace maniple
