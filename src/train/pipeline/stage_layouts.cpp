#include "train/pipeline/stage_layouts.h"

#include <algorithm>

#include "train/tensor_layout.h"

namespace maniple {

// A Pipeline may be made from the stages of another one that is about to be destroyed: its records then replace the
// other's.
void StageLayouts::add(const torch::Tensor& parameter, const std::shared_ptr<ProcessGroup>& group,
                       const std::string& owner) {
  TensorLayout layout = layout_of(parameter);
  group_ = group;
  std::erase_if(layout.divided_over, [&](const auto& other) { return detail::same_ranks(*other, *group); });
  if (layout.divided_over.empty()) layout = TensorLayout();
  earlier_.push_back({parameter, layout});
  layout.divided_over.insert(layout.divided_over.begin(), group);
  if (!layout.divided()) {
    layout.kind = LayoutKind::pipeline_stage;
    layout.owner = owner;
  }
  set_layout(parameter, std::move(layout));
}

void StageLayouts::add(const torch::nn::Module& stage, const std::shared_ptr<ProcessGroup>& group,
                       const std::string& owner) {
  for (const torch::Tensor& parameter : detail::distinct(stage.parameters())) add(parameter, group, owner);
}

void StageLayouts::tie(const torch::Tensor& parameter, bool counted) {
  TensorLayout layout = layout_of(parameter);
  layout.counted = counted;
  set_layout(parameter, std::move(layout));
}

StageLayouts::~StageLayouts() {
  const auto group = group_.lock();
  for (Earlier& one : earlier_) {
    try {
      const auto now = layout_of(one.parameter).divided_over;
      if (std::find(now.begin(), now.end(), group) != now.end()) set_layout(one.parameter, std::move(one.layout));
    } catch (const std::exception&) {
      // A group that divides the parameter is gone; the next use of its layout reports that.
    }
  }
}

}  // namespace maniple
