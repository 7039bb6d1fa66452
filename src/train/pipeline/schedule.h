// Schedules of a pipeline: in which order a rank computes forward and backward of its stages for the micro-batches of a
// step.
//
// Stage s of ranks x chunks is chunk s / ranks of rank s % ranks. A schedule is a pure function; the table of schedules
// is in schedule.cpp, each function in a file of its own. A new one is a file, a line there and a name in
// PipelineSchedule.
//
// Backwards of a stage are in the order of micro-batches in all of them, so that gradients are added in the same order,
// too.
#pragma once

#include <span>
#include <vector>

#include <maniple/train/pipeline.h>

namespace maniple {

struct PipelineAction {
  enum class Kind : std::uint8_t { forward, backward };
  Kind kind = Kind::forward;
  int chunk = 0;  ///< which of the rank's stages
  int micro_batch = 0;
  friend bool operator==(const PipelineAction&, const PipelineAction&) = default;
};

using PipelineActions = std::vector<PipelineAction>;

struct PipelineShape {
  int rank = 0;
  int ranks = 1;
  int chunks = 1;  ///< stages of each rank
  int micro_batches = 1;
};

struct ScheduleInfo {
  PipelineSchedule schedule;
  const char* name;
  PipelineActions (*make)(const PipelineShape& shape);
  bool several_stages;  ///< whether a rank may have more than one
};

/// In the order of PipelineSchedule.
std::span<const ScheduleInfo> schedules() noexcept;
const ScheduleInfo& info(PipelineSchedule schedule) noexcept;

/// All forwards, then all backwards.
PipelineActions gpipe_actions(const PipelineShape& shape);
/// Forwards until the first backward can be, then backward and forward in turn.
PipelineActions one_f_one_b_actions(const PipelineShape& shape);
/// The same where a rank has several stages.
PipelineActions interleaved_actions(const PipelineShape& shape);

/// Only the forwards, for inference.
PipelineActions forward_actions(const PipelineShape& shape);

/// The first `warm_up` forwards, then a forward and a backward in turn, then the other backwards.
PipelineActions alternate(const PipelineActions& forwards, const PipelineActions& backwards, std::size_t warm_up);

}  // namespace maniple
