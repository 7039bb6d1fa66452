// One step of a pipeline on one rank: the actions of its schedule, and the messages between them.
//
// The output of stage b is *boundary* b. Its activation goes to stage b + 1, and its gradient comes back. Each is one
// message, or is handed over directly if both stages are on one rank. Messages are matched by tag, so the order in
// which they are sent and posted does not matter. The receiver of an activation must know its shape: either it knows
// the shape from an earlier step of the same kind, or a header, a message of fixed length, comes first. The header is a
// host message, wherever the stages are.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include "train/pipeline/schedule.h"
#include "train/tensor/torch_compat.h"

namespace maniple {

/// State of a pipeline's rank that lasts from step to step.
struct PipelineRank {
  std::shared_ptr<ProcessGroup> group;  ///< the pipeline's own group
  int chunks = 1;
  PipelineOptions options;
  std::vector<torch::nn::AnyModule> stages;
  std::vector<torch::Device> devices;                        ///< one per stage
  std::vector<std::unique_ptr<GradientAverager>> averagers;  ///< one per stage; null: nothing is averaged
  PipelineStatistics statistics;

  int rank() const { return group->rank(); }
  int ranks() const { return group->size(); }
  int stage_of(int chunk) const { return chunk * ranks() + rank(); }
  int last_stage() const { return chunks * ranks() - 1; }
  bool is_last_rank() const { return rank() == ranks() - 1; }
};

/// The shape of an activation.
struct ActivationShape {
  std::vector<std::int64_t> sizes;
  torch::ScalarType dtype = torch::kFloat32;
  bool requires_grad = false;
  friend bool operator==(const ActivationShape&, const ActivationShape&) = default;
  std::string text() const;
};

/// The shapes that this rank has seen in one kind of step, by boundary and micro-batch.
struct KnownShapes {
  bool complete = false;
  std::map<std::pair<int, int>, ActivationShape> of;
};

enum class PipelineCall : std::uint8_t { step, evaluate, forward };

struct PipelineBatch {
  std::vector<std::int64_t> rows;              ///< rows of each micro-batch
  std::vector<torch::Tensor> inputs, targets;  ///< empty where this rank does not need them
};

class PipelineStep {
 public:
  PipelineStep(PipelineRank& rank, PipelineCall call, PipelineBatch batch, KnownShapes& shapes);

  /// Throws what a stage throws; doing() then describes the action that failed.
  void run();
  std::string doing() const;

  /// Only on the rank of the last stage.
  double mean_loss() const;
  torch::Tensor output() const;

 private:
  /// The end of a stage's graph at the stage's input, which takes the gradient. The input is not a leaf, so that a
  /// stage may begin with an in-place operation.
  struct TakeGradient final : torch::autograd::Node {
    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
      gradient = std::move(gradients[0]);
      return {};
    }
    std::string name() const override { return "PipelineInput"; }
    torch::Tensor gradient;
  };
  enum class Direction : std::uint8_t { activation, gradient };
  using Key = std::pair<int, int>;  // boundary, micro-batch
  struct Incoming {
    torch::Tensor tensor, header;
    Work work, header_work;
  };
  /// State between a forward and its backward.
  struct Pending {
    NodePointer<TakeGradient> input;  // null: the input requires no gradient
    ActivationShape input_shape;
    torch::autograd::Edge root;   // of the output, or of the loss; invalid: no gradient is needed
    torch::Tensor root_gradient;  // gradient of the loss
  };

  void forward(const PipelineAction& action);
  void backward(const PipelineAction& action);
  torch::Tensor computed(int chunk, const torch::Tensor& input);
  void finish_last(int micro_batch, const torch::Tensor& output, Pending& pending);

  int rank_of(int stage) const { return stage % rank_.ranks(); }
  int tag_of(Direction direction, Key key, bool header = false) const;
  void deliver(Direction direction, Key key, const torch::Tensor& tensor, int to_stage);
  void note_shape(Key key, const ActivationShape& shape, int to_stage);
  void post(const PipelineAction& action);
  void post_data(Direction direction, Key key, const ActivationShape& shape, int chunk);
  torch::Tensor received(Direction direction, Key key, int chunk, int from_stage);
  void wait(const Work& work);

  PipelineRank& rank_;
  PipelineCall call_;
  PipelineBatch batch_;
  KnownShapes& shapes_;
  PipelineActions actions_;
  std::size_t at_ = 0;
  std::map<std::pair<Direction, Key>, Incoming> incoming_;
  std::map<std::pair<int, int>, Pending> pending_;  // by chunk and micro-batch
  std::vector<Work> sends_;
  std::vector<torch::Tensor> losses_, outputs_;
};

}  // namespace maniple
