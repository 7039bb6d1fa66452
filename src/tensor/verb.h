// How a verb of dist.h runs: now, or as a Work that ends with the tensors written back.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "group/group_impl.h"
#include "tensor/staged.h"
#include <maniple/dist.h>

namespace maniple {

inline std::shared_ptr<ProcessGroup> group_of(const DistOptions& options) {
  return options.group ? options.group : get_default_group();
}

/// False for a rank that is not in the group: the verb is to do nothing, whatever its arguments. The first such is told.
inline bool takes_part(ProcessGroup& group, const char* verb) { return group.impl().takes_part(verb); }

inline CallOptions call_of(const DistOptions& options) {
  return {.timeout = options.timeout, .async_op = options.async_op, .where = options.where};
}

/// The tensors are kept alive and written back before the Work is done.
inline Work finishing(const Work& work, std::vector<Staged> tensors) {
  return work.then([tensors = std::move(tensors)] {
    for (const Staged& tensor : tensors) tensor.write_back();
  });
}

/// Runs `now()` or starts `later()`, which returns a Work.
template <class Now, class Later>
Work run_verb(const DistOptions& options, std::vector<Staged> tensors, Now&& now, Later&& later) {
  if (options.async_op) return finishing(later(), std::move(tensors));
  now();
  for (const Staged& tensor : tensors) tensor.write_back();
  return done_work();
}

}  // namespace maniple
