// What DistributedDataParallel can say about itself. Times are this rank's own, in milliseconds.
//
//   std::cout << ddp.statistics().text();
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace maniple {

struct DdpStatistics {
  struct Bucket {
    std::string dtype;                    ///< "float32"
    std::uint64_t bytes = 0;              ///< with the padding between parameters
    std::vector<std::string> parameters;  ///< in the order in which their gradients are ready
  };

  int ranks = 1;
  std::string overlap;               ///< "none", "inline", "thread": what `automatic` became
  std::vector<Bucket> buckets;       ///< empty before the end of the first synchronised backward
  std::uint64_t parameters = 0;      ///< that take part
  std::uint64_t gradient_bytes = 0;  ///< reduced in each synchronised backward
  std::uint64_t backwards = 0;       ///< synchronised ones, the first (which lays out the buckets) included

  // Means over the synchronised backwards after the first, and the last one of them.
  double backward_ms = 0;  ///< from the first gradient to the end of backward
  double comm_ms = 0;      ///< during which buckets were being averaged
  double wait_ms = 0;      ///< during which backward stood still for it
  double last_backward_ms = 0;
  double last_comm_ms = 0;
  double last_wait_ms = 0;

  /// The part of the communication that was hidden behind computation: 1 - wait_ms / comm_ms, 0 where nothing was
  /// communicated.
  double overlap_fraction() const noexcept { return comm_ms > 0 && wait_ms < comm_ms ? 1 - wait_ms / comm_ms : 0; }

  /// A few lines for people.
  std::string text() const;
};

}  // namespace maniple
