// Records, for the lifetime of a Pipeline, that its ranks hold different parameters (maniple/train/tensor_layout.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <maniple/train/tensor_layout.h>

namespace maniple {

class StageLayouts {
 public:
  StageLayouts() = default;
  ~StageLayouts();
  StageLayouts(const StageLayouts&) = delete;
  StageLayouts& operator=(const StageLayouts&) = delete;

  /// `group`: the ranks of the pipeline.
  void add(const torch::nn::Module& stage, const std::shared_ptr<ProcessGroup>& group, const std::string& owner);
  /// Records a parameter of a stage that other ranks hold, too. `counted` is true on the first of these ranks.
  void tie(const torch::Tensor& parameter, bool counted);

 private:
  struct Earlier {
    torch::Tensor parameter;
    TensorLayout layout;
  };
  void add(const torch::Tensor& parameter, const std::shared_ptr<ProcessGroup>& group, const std::string& owner);

  std::vector<Earlier> earlier_;
  std::weak_ptr<ProcessGroup> group_;
};

}  // namespace maniple
