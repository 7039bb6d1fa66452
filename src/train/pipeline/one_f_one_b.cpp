// 1F1B (PipeDream-Flush, Narayanan et al., 2021). As fast as GPipe, but rank r keeps the activations of at most ranks -
// r micro-batches.
#include <algorithm>

#include "train/pipeline/schedule.h"

namespace maniple {

PipelineActions one_f_one_b_actions(const PipelineShape& shape) {
  PipelineActions forwards, backwards;
  for (int m = 0; m < shape.micro_batches; ++m) {
    forwards.push_back({PipelineAction::Kind::forward, 0, m});
    backwards.push_back({PipelineAction::Kind::backward, 0, m});
  }
  return alternate(forwards, backwards, shape.ranks - shape.rank - 1);
}

}  // namespace maniple
