// How a verb of dist.h runs: now, or as a Work that ends with the tensors written back.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "group/work_state.h"
#include "tensor/staged.h"
#include <maniple/dist.h>

namespace maniple {

inline std::shared_ptr<ProcessGroup> group_of(const DistOptions& options) {
  return options.group ? options.group : get_default_group();
}

inline Call call_of(const DistOptions& options) {
  CallOptions given;
  given.timeout = options.timeout;
  return Call(given, options.where);
}

/// A Work that is done.
inline Work done_work() {
  static const auto state = [] {
    auto done = std::make_shared<Work::State>();
    done->finish(nullptr);
    return done;
  }();
  return Work(state);
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
