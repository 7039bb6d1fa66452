// The one measuring loop, used for Maniple, the peers and the limits alike.
//
// For each size: one checked call, warm-up, then timed back-to-back calls. The times are those of rank 0, as most MPI
// benchmarks take them: an operation that lets its root run ahead (broadcast, reduce of small buffers) is timed at that
// pace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "bench/case.h"
#include "bench/order.h"
#include "bench/row.h"

namespace maniple::bench {

/// A system under measurement, seen from one rank.
class Subject {
 public:
  virtual ~Subject() = default;
  virtual int rank() const = 0;
  virtual std::string transport() const = 0;

  /// Memory of at least `bytes`, page-aligned, of the order's buffer kind. Valid until the next call.
  virtual std::byte* memory(std::size_t bytes) = 0;

  /// Announces the calls to come; `in` and `out` are the same for operations in place.
  virtual void prepare(const Case& what, std::byte* in, std::byte* out) = 0;
  virtual void call() = 0;

  /// The largest of all ranks' values, on all ranks.
  virtual std::uint64_t largest(std::uint64_t value) = 0;
};

/// Runs the order and hands each row to `report`, on every rank (only rank 0's rows hold timings worth showing).
void measure(Subject& subject, const Order& order, const std::function<void(const Row&)>& report);

/// Prints rows as JSON lines on rank 0: the whole main loop of a peer's program.
void measure_and_print(Subject& subject, const Order& order);

}  // namespace maniple::bench
