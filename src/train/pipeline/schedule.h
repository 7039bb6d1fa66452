// Schedules of a pipeline: the order in which a rank computes forward and backward of its stages for the micro-batches
// of a step.
//
// With `ranks` ranks and `chunks` chunks, stage s is chunk s / ranks of rank s % ranks. A schedule is a pure function.
// The table of schedules is in schedule.cpp, and each function has its own file. To add a schedule, add a file, a row
// there and a name in PipelineSchedule.
//
// Every schedule runs the backwards of a stage in the order of the micro-batches, so that gradients are always added in
// the same order.
#pragma once

#include <span>
#include <vector>

#include <maniple/train/pipeline.h>

namespace maniple {

struct PipelineAction {
  enum class Kind : std::uint8_t { forward, backward };
  Kind kind = Kind::forward;
  int chunk = 0;  ///< index of the stage among the rank's stages
  int micro_batch = 0;
  friend bool operator==(const PipelineAction&, const PipelineAction&) = default;
};

using PipelineActions = std::vector<PipelineAction>;

struct PipelineShape {
  int rank = 0;
  int ranks = 1;
  int chunks = 1;  ///< stages per rank
  int micro_batches = 1;
};

struct ScheduleInfo {
  PipelineSchedule schedule;
  const char* name;
  PipelineActions (*make)(const PipelineShape& shape);
  bool several_stages;  ///< whether a rank may have several stages
};

/// The table, in the order of PipelineSchedule.
std::span<const ScheduleInfo> schedules() noexcept;
const ScheduleInfo& info(PipelineSchedule schedule) noexcept;

/// All forwards, then all backwards.
PipelineActions gpipe_actions(const PipelineShape& shape);
/// Forwards until the first backward is possible, then backwards and forwards in turn.
PipelineActions one_f_one_b_actions(const PipelineShape& shape);
/// The same for ranks with several stages.
PipelineActions interleaved_actions(const PipelineShape& shape);

/// Only the forwards, for inference.
PipelineActions forward_actions(const PipelineShape& shape);

/// The first `warm_up` forwards, then forwards and backwards in turn, then the remaining backwards.
PipelineActions alternate(const PipelineActions& forwards, const PipelineActions& backwards, std::size_t warm_up);

}  // namespace maniple
