// Which gradients travel together: a pure function of sizes, dtypes and the order in which gradients are ready.
//
// Parameters are taken in that order and put into the open bucket of their dtype; a bucket that has reached its limit
// is closed. The first bucket of each dtype has a limit of its own. Buckets are numbered by when their last gradient
// is ready, because that is when they can be averaged. A parameter larger than the limit makes a bucket by itself or ends
// one.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace maniple {

/// Gradients begin at multiples of this many bytes of their bucket, for the sake of vector instructions.
inline constexpr std::size_t kGradientAlignment = 64;

struct PlannedParameter {
  std::size_t elements = 0;
  std::size_t element_bytes = 4;
  int kind = 0;  ///< dtype; parameters of different kinds do not share a bucket
};

struct PlannedBucket {
  int kind = 0;
  std::vector<std::size_t> members;  ///< parameters, in the order in which their gradients are ready
  std::vector<std::size_t> offsets;  ///< where they begin, in elements
  std::size_t elements = 0;          ///< with padding
  std::size_t bytes = 0;
};

struct BucketLimits {
  double first_bytes = 0;
  double bytes = 0;
};

/// `order` holds every index of `parameters` once.
std::vector<PlannedBucket> plan_buckets(std::span<const PlannedParameter> parameters,
                                        std::span<const std::size_t> order, const BucketLimits& limits);

}  // namespace maniple
