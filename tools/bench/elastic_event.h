// What elastic_faults_worker records for `maniple bench elastic`.
#pragma once

#include <cstdint>
#include <type_traits>

namespace maniple::bench {

/// A record of a file to which all processes of a job append.
struct ElasticEvent {
  enum class Kind : std::int32_t {
    ready,   ///< the process begins Trainer::fit()
    step,    ///< a step is committed
    killed,  ///< the process kills itself after the step
  };

  double at = 0;   ///< seconds of CLOCK_MONOTONIC
  double cpu = 0;  ///< CPU time of the process, in seconds
  std::int64_t step = 0;
  std::int32_t pid = 0;
  std::int32_t rank = 0;
  std::int32_t ranks = 0;
  Kind kind = Kind::ready;
};
static_assert(std::is_trivially_copyable_v<ElasticEvent>);

}  // namespace maniple::bench
