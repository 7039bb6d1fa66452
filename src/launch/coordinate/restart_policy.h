// When a failed group is started again: at most so many times, waiting longer each time. Pure.
#pragma once

#include <algorithm>
#include <chrono>

namespace maniple::launch {

struct RestartPolicy {
  int max_restarts = 0;
  std::chrono::duration<double> first_delay{1.0};
  std::chrono::duration<double> longest_delay{30.0};

  bool allows(int failures_so_far) const noexcept { return failures_so_far <= max_restarts; }

  /// Before the n-th restart, n from 1: the first delay, doubled each time up to the longest.
  std::chrono::duration<double> delay_before(int restart) const noexcept {
    double seconds = first_delay.count();
    for (int i = 1; i < restart && seconds < longest_delay.count(); ++i) seconds *= 2;
    return std::chrono::duration<double>(std::min(seconds, longest_delay.count()));
  }
};

}  // namespace maniple::launch
