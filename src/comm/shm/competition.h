// Detects other processes that compete for the cores, from the gaps that a waiting thread observes (see waiter.h).
//
// In a gap either another process had the core or, on a virtual machine, the host did. Against the host, sleeping does
// not help: it only adds the wake-up time. To distinguish the two cases, this class reads the kernel's count of the
// time that a thread was ready while others ran. If the host takes the core while a short task runs on it, the kernel
// counts the stolen time as well, so the stolen time is read, too.
#pragma once

#include <optional>

namespace maniple {

class Competition {
 public:
  /// Whether another process took the core between `from` and `to`, in seconds of any clock: for half of a gap that is
  /// as long as a time slice, or for a good part of the time in shorter gaps. `delay`: seconds for which this thread
  /// has been ready while others ran, so far; nullopt if the kernel does not count them, and then the result is true.
  /// `stolen` returns the seconds the host has taken from this core, so far. It is slow, and called only when the
  /// result depends on it.
  bool is_in_gap(double from, double to, std::optional<double> delay, double (*stolen)() noexcept) noexcept;

  /// `delay` of the calling thread.
  static std::optional<double> delay_of_thread() noexcept;

  /// `stolen` of the calling thread's core; 0 on a physical machine.
  static double stolen_from_core() noexcept;

  /// is_in_gap for the calling thread. Each thread keeps its own observations.
  static bool is_in_gap_of_thread(double from, double to) noexcept;

 private:
  struct Seen {
    double when = 0, delay = 0, stolen = 0;
  };
  bool is_delayed(double from, double to, double delay) noexcept;
  bool is_by_host(const Seen& now) noexcept;

  bool any_ = false;
  double last_delay_ = 0;  // as of the last gap
  Seen window_;            // start of the window that sums short gaps
  Seen before_, asked_;    // readings of `stolen`
};

}  // namespace maniple
