#include "train/pipeline/schedule.h"

namespace maniple {
namespace {

constexpr ScheduleInfo kSchedules[] = {
    {PipelineSchedule::gpipe, "gpipe", gpipe_actions, true},
    {PipelineSchedule::one_f_one_b, "1f1b", one_f_one_b_actions, false},
    {PipelineSchedule::interleaved, "interleaved", interleaved_actions, true},
};

}  // namespace

std::span<const ScheduleInfo> schedules() noexcept { return kSchedules; }

const ScheduleInfo& info(PipelineSchedule schedule) noexcept { return kSchedules[static_cast<std::size_t>(schedule)]; }

PipelineActions forward_actions(const PipelineShape& shape) {
  PipelineActions actions;
  for (int chunk = 0; chunk < shape.chunks; ++chunk) {
    for (int m = 0; m < shape.micro_batches; ++m) actions.push_back({PipelineAction::Kind::forward, chunk, m});
  }
  return actions;
}

PipelineActions alternate(const PipelineActions& forwards, const PipelineActions& backwards, std::size_t warm_up) {
  PipelineActions actions;
  std::size_t next = 0;
  for (std::size_t i = 0; i < forwards.size(); ++i) {
    actions.push_back(forwards[i]);
    if (i >= warm_up) actions.push_back(backwards[next++]);
  }
  actions.insert(actions.end(), backwards.begin() + static_cast<std::ptrdiff_t>(next), backwards.end());
  return actions;
}

}  // namespace maniple
