// Interleaved 1F1B (Narayanan et al., 2021): a rank has several stages that are not adjacent, so that the pipeline
// fills and drains after fewer layers. The bubble is divided by the number of stages per rank; the number of messages
// is multiplied by it.
//
// Micro-batches pass through the ranks in rounds of at least `ranks` micro-batches (a single round if there are fewer).
// The micro-batches of a round pass a rank's first stage, then its second, and so on. Round sizes differ by one if the
// number of micro-batches is not divisible; rounds of fewer than `ranks` would deadlock.
#include <algorithm>

#include "train/pipeline/schedule.h"

namespace maniple {

PipelineActions interleaved_actions(const PipelineShape& shape) {
  if (shape.chunks == 1) return one_f_one_b_actions(shape);
  const int rounds = std::max(1, shape.micro_batches / shape.ranks);
  const auto size_of = [&](int round) {
    return shape.micro_batches / rounds + (round < shape.micro_batches % rounds ? 1 : 0);
  };
  PipelineActions forwards, backwards;
  for (int round = 0, begin = 0; round < rounds; begin += size_of(round), ++round) {
    for (int chunk = 0; chunk < shape.chunks; ++chunk) {
      for (int m = begin; m < begin + size_of(round); ++m) {
        forwards.push_back({PipelineAction::Kind::forward, chunk, m});
        backwards.push_back({PipelineAction::Kind::backward, shape.chunks - 1 - chunk, m});
      }
    }
  }
  const int warm_up = 2 * (shape.ranks - shape.rank - 1) + (shape.chunks - 1) * size_of(0);
  return alternate(forwards, backwards, warm_up);
}

}  // namespace maniple
