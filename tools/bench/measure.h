// The measuring loop, shared by Maniple, the peers and the limits.
//
// For each size: one checked call, warm-up, then timed back-to-back calls. Times are taken on rank 0, as in most MPI
// benchmarks. An operation that lets its root run ahead (broadcast, reduce of small buffers) is timed at the root's
// pace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <string>

#include "tools/bench/work_item.h"

namespace maniple::bench {

/// Ordinary memory as programs use it: page-aligned, without advice about page sizes, grown when needed. The same for
/// all systems.
class PageMemory {
 public:
  std::byte* at_least(std::size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      const std::size_t rounded = (bytes + kPage - 1) / kPage * kPage;
      memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, rounded)));
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = rounded;
    }
    return memory_.get();
  }

 private:
  static constexpr std::size_t kPage = 4096;
  struct Free {
    void operator()(std::byte* memory) const noexcept { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t size_ = 0;
};

/// One rank's access to the measured system, the counterpart of an MPI communicator.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual std::string transport() const = 0;

  /// At least `bytes` of page-aligned memory of the work item's buffer kind. Valid until memory() is called again.
  virtual std::byte* memory(std::size_t bytes) = 0;

  /// Announces the next calls; `in` equals `out` for in-place operations.
  virtual void prepare(const Case& what, std::byte* in, std::byte* out) = 0;
  virtual void call() = 0;

  /// The maximum over all ranks' values, returned on all ranks.
  virtual std::uint64_t largest(std::uint64_t value) = 0;
};

/// Measures the work item and passes each row to `report` on every rank. Only rank 0's rows hold meaningful timings.
void measure(Communicator& communicator, const WorkItem& item, const std::function<void(const Row&)>& report);

/// Measures, and prints the rows as JSON lines on rank 0: the entire main loop of a peer's program.
void measure_and_print(Communicator& communicator, const WorkItem& item);

// Known inputs, so that each rank can check its result by itself.
//
// Values are small whole numbers that depend on rank and index without a period. Misplaced or stale parts are therefore
// detected, and sums are exact in every dtype.

/// Writes the input of `rank`: `case.in_count(rank)` elements.
void fill_input(const Case& what, int rank, void* input);

/// The number of wrong elements in `rank`'s output. Checks all elements up to 256 Ki, beyond that both ends and a
/// sample.
std::size_t count_wrong(const Case& what, int rank, const void* output);

}  // namespace maniple::bench
