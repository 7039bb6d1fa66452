// Whether other processes want the cores of the ranks, by the gaps that a thread sees in its own waiting.
//
// A gap is time in which a thread that only looks at a word did not look: another process had its core. Or, where the machine is a
// virtual one, its host had: against that sleeping does not help, and only adds the time that waking takes there. The kernel tells
// them apart: it counts how long a thread was ready to run while others ran. But where the host takes a core away while something short runs
// on it, all of that counts, too; so what the host took is asked as well.
#pragma once

#include <optional>

namespace maniple {

class Competition {
 public:
  /// Of a gap, in seconds of any clock. `delay`: seconds for which this thread has been ready to run while others ran, so far; none: the
  /// kernel does not count. Of competition that is half of a gap as long as a time slice, or of shorter ones a good part of the time:
  /// something short now and then is none. `stolen` returns the seconds that the host has had of this core, so far; it is asked only
  /// when it matters, as it takes a while.
  bool is_in_gap(double from, double to, std::optional<double> delay, double (*stolen)() noexcept) noexcept;

  /// The `delay` of the calling thread.
  static std::optional<double> delay_of_thread() noexcept;

  /// The `stolen` of the core that the calling thread is on; 0 on a machine that is not virtual.
  static double stolen_from_core() noexcept;

  /// is_in_gap of the calling thread. What a thread has seen is its own.
  static bool is_in_gap_of_thread(double from, double to) noexcept;

 private:
  struct Seen {
    double when = 0, delay = 0, stolen = 0;
  };
  bool is_delayed(double from, double to, double delay) noexcept;
  bool is_by_host(const Seen& now) noexcept;

  bool any_ = false;
  double last_delay_ = 0;  // at the last gap
  Seen window_;            // since when short gaps are added up
  Seen before_, asked_;    // when `stolen` was asked
};

}  // namespace maniple
