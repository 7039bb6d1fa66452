// Whether other processes want the cores of the ranks, by the gaps that a thread sees in its own waiting.
//
// A gap is time in which a thread that only looks at a word did not look: another process had its core. Or, where the machine is a
// virtual one, its host had: against that sleeping does not help, and only adds the time that waking takes there. The kernel tells
// them apart: it counts how long a thread was ready to run while others ran.
#pragma once

#include <optional>

namespace maniple {

class Competition {
 public:
  /// Of a gap, in seconds of any clock. `delay`: seconds for which this thread has been ready to run while others ran, so far; none: the
  /// kernel does not count. Of competition that is half of a gap as long as a time slice, or of shorter ones a good part of the time since
  /// the last gap: something short now and then is none.
  bool is_in_gap(double from, double to, std::optional<double> delay) noexcept;

  /// The `delay` of the calling thread.
  static std::optional<double> delay_of_thread() noexcept;

 private:
  std::optional<double> last_;  // the end of the last gap, and the delay then
  double last_delay_ = 0;
};

}  // namespace maniple
