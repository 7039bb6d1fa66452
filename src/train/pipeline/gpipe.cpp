// GPipe (Huang et al., 2019). The simplest schedule; keeps the activations of all micro-batches until the first
// backward.
#include "train/pipeline/schedule.h"

namespace maniple {

PipelineActions gpipe_actions(const PipelineShape& shape) {
  PipelineActions actions = forward_actions(shape);
  for (int chunk = shape.chunks - 1; chunk >= 0; --chunk) {
    for (int m = 0; m < shape.micro_batches; ++m) actions.push_back({PipelineAction::Kind::backward, chunk, m});
  }
  return actions;
}

}  // namespace maniple
