// Which way of overlapping communication with backward suits a group: what Overlap::automatic stands for.
#pragma once

#include <cstddef>

#include <maniple/comm/process_group.h>
#include <maniple/train/ddp.h>

namespace maniple {

/// What the choice depends on.
struct OverlapFacts {
  int hosts = 1;
  int cores = 1;                   ///< that the ranks of the (only) host may use together
  int threads = 1;                 ///< that they compute with together
  std::size_t gradient_bytes = 0;  ///< of a rank
};

/// Between hosts there is a wire to wait for. Within one, averaging is work for cores: a thread of its own pays when there
/// are cores that nobody computes on (more than as many again, because two cores of a processor are often halves of one),
/// and enough work that waking it does not matter.
Overlap choose_overlap(const OverlapFacts& facts) noexcept;

/// `requested`, unless that is automatic: then a choice on which all ranks agree, which is a collective call.
Overlap resolve_overlap(Overlap requested, ProcessGroup& group, std::size_t gradient_bytes);

}  // namespace maniple
