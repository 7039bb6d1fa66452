// The one measuring loop, used for Maniple, the peers and the limits alike.
//
// For each size: one checked call, warm-up, then timed back-to-back calls. The times are those of rank 0, as most MPI
// benchmarks take them: an operation that lets its root run ahead (broadcast, reduce of small buffers) is timed at that
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

/// Ordinary memory as programs have it: page-aligned, no advice about page sizes, grown when needed. The same for all
/// systems.
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

/// One rank's access to the system that is measured: the counterpart of an MPI communicator.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual std::string transport() const = 0;

  /// Memory of at least `bytes`, page-aligned, of the work item's buffer kind. Valid until the next call.
  virtual std::byte* memory(std::size_t bytes) = 0;

  /// Announces the calls to come; `in` and `out` are the same for operations in place.
  virtual void prepare(const Case& what, std::byte* in, std::byte* out) = 0;
  virtual void call() = 0;

  /// The largest of all ranks' values, on all ranks.
  virtual std::uint64_t largest(std::uint64_t value) = 0;
};

/// Measures the work item and hands each row to `report`, on every rank (only rank 0's rows hold timings worth
/// showing).
void measure(Communicator& communicator, const WorkItem& item, const std::function<void(const Row&)>& report);

/// Prints rows as JSON lines on rank 0: the whole main loop of a peer's program.
void measure_and_print(Communicator& communicator, const WorkItem& item);

// Inputs that are known everywhere, so that each rank can tell by itself whether its result is right.
//
// Values are small whole numbers that depend on rank and index without a period: a misplaced or stale part shows, and
// sums are exact in every dtype.

/// Writes the input of `rank`: `case.in_count(rank)` elements.
void fill_input(const Case& what, int rank, void* input);

/// How many of the checked elements of `rank`'s output are wrong: all are checked up to 256 Ki elements, beyond that
/// both ends and a sample.
std::size_t count_wrong(const Case& what, int rank, const void* output);

}  // namespace maniple::bench
