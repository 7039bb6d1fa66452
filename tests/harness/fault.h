// A fault is one scripted line: `.fault = kill_at(3, 10)` strikes rank 3 when it calls `r.step()` for the tenth time.
#pragma once

#include <stdexcept>

#include <maniple/comm/options.h>

namespace maniple::harness {

struct Fault {
  enum class Kind { none, kill, stop, exit, raise, delay };
  Kind kind = Kind::none;
  int rank = -1;
  int step = 0;  ///< 1 is the first call of step()
  Seconds duration{0};

  /// The rank will not end the way other ranks do.
  bool ends_rank() const noexcept { return kind != Kind::none && kind != Kind::delay; }
};

inline Fault kill_at(int rank, int step) { return {Fault::Kind::kill, rank, step, {}}; }    ///< SIGKILL
inline Fault stop_at(int rank, int step) { return {Fault::Kind::stop, rank, step, {}}; }    ///< SIGSTOP
inline Fault exit_at(int rank, int step) { return {Fault::Kind::exit, rank, step, {}}; }    ///< exit(7)
inline Fault throw_at(int rank, int step) { return {Fault::Kind::raise, rank, step, {}}; }  ///< throws InjectedFault
inline Fault delay_at(int rank, int step, Seconds duration) { return {Fault::Kind::delay, rank, step, duration}; }

/// Thrown by a scripted fault; a rank that ends by it has not failed.
struct InjectedFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace maniple::harness
