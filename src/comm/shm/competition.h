// Detects other processes that compete for the cores, by the gaps that a waiting thread sees (see waiter.h).
//
// In a gap either another process had the core or, on a virtual machine, the host did. Against the host sleeping does
// not help: it only adds the time that waking takes. The kernel counts how long a thread was ready to run while others
// ran, which tells the two apart. Where the host takes the core while something short runs there, the kernel counts all
// of that as well, so the time that the host took is read, too.
#pragma once

#include <optional>

namespace maniple {

class Competition {
 public:
  /// Whether another process took the core between `from` and `to`, in seconds of any clock: for half of a gap as long
  /// as a time slice, or for a good part of the time in shorter gaps. `delay`: seconds for which this thread has been
  /// ready to run while others ran, so far; none if the kernel does not count them. `stolen` returns the seconds that
  /// the host has taken from this core, so far; it is slow and called only when the result depends on it.
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
