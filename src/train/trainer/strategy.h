// How a Trainer computes and communicates: a class for each alternative of Strategy, so that the loop in trainer.cpp is
// the same for all.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <torch/torch.h>

#include <maniple/train/accumulation.h>
#include <maniple/train/trainer.h>

namespace maniple {

/// Replicas of the whole model, averaged by DistributedDataParallel; without a group, this process alone. Others derive
/// from it.
class TrainerStrategy {
 public:
  struct Given {
    detail::TrainerModel model;
    torch::optim::Optimizer& optimizer;
    std::function<std::shared_ptr<void>()> autocast;
  };
  /// The loss of a batch as backward gets it: divided for accumulation, multiplied by a GradScaler. Called once for
  /// each batch.
  using Scaled = std::function<torch::Tensor(const torch::Tensor&)>;

  /// Collective. Throws InvalidArgument, before anything is changed, for what the strategy cannot train.
  static std::unique_ptr<TrainerStrategy> make(const Strategy& choice, Given given);
  /// `averaged_over`: the ranks of DistributedDataParallel; null: none.
  TrainerStrategy(Given given, std::shared_ptr<ProcessGroup> world, std::shared_ptr<ProcessGroup> averaged_over = {},
                  DdpOptions ddp = {});
  virtual ~TrainerStrategy();

  const std::shared_ptr<ProcessGroup>& world() const noexcept { return world_; }  ///< null: this process alone
  int ranks() const { return world_ ? world_->size() : 1; }
  virtual int data_ranks() const { return ranks(); }    ///< how many of them have different batches
  virtual bool reports() const { return true; }         ///< whether this rank's metrics count
  virtual bool divides_model() const { return false; }  ///< then no rank can save the model alone
  /// The ranks that have different batches and communicate in forward: in an evaluation, too, where some have fewer.
  /// Null: none.
  virtual ProcessGroup* forward_group() const { return nullptr; }
  /// The ranks that compute on the same batches. Null: none.
  virtual ProcessGroup* same_batches() const { return nullptr; }

  virtual torch::nn::Module& module() { return *given_.model.module; }       ///< as checkpoints have it
  virtual torch::optim::Optimizer& optimizer() { return given_.optimizer; }  ///< the one that steps
  detail::DdpBase* ddp() const noexcept { return ddp_.get(); }               ///< null: none

  /// Throws InvalidArgument for data whose loss the strategy cannot compute.
  virtual void require_usable(const detail::TrainerData& data) const;
  /// Collective over same_batches(): throws InvalidArgument on all of them if they have different batches.
  void require_same_batch(const detail::TrainerBatch& batch) const;
  virtual Accumulation accumulation(int batches);
  /// Forward, with a graph if grad mode is on.
  virtual torch::Tensor loss_of(const detail::TrainerBatch& batch, Metrics& metrics);
  /// Forward and backward. Returns the loss, detached and unscaled.
  virtual torch::Tensor backward(const detail::TrainerBatch& batch, Metrics& metrics, const Scaled& scaled);
  /// After the backward of a step, before clipping.
  virtual void finish_backward() {}
  /// Options of param_groups() from the program's optimizer to the one that steps: before a step or a save; and back,
  /// after a load.
  virtual void take_options() {}
  virtual void give_options() {}
  /// What is not finite on this rank when it computes the batch, or empty. Collective; gradients are undefined
  /// afterwards.
  virtual std::string nonfinite_in(const detail::TrainerBatch& batch);

  void drop_gradients();

 protected:
  std::shared_ptr<void> autocast() const { return given_.autocast ? given_.autocast() : nullptr; }

  Given given_;
  std::unique_ptr<detail::DdpBase> ddp_;

 private:
  std::shared_ptr<ProcessGroup> world_;
};

namespace trainer {

// Each in a file of its own.
std::unique_ptr<TrainerStrategy> make(const strategy::DataParallel& choice, TrainerStrategy::Given given);
std::unique_ptr<TrainerStrategy> make(const strategy::Zero1& choice, TrainerStrategy::Given given);
std::unique_ptr<TrainerStrategy> make(const strategy::FullySharded& choice, TrainerStrategy::Given given);
std::unique_ptr<TrainerStrategy> make(const strategy::TensorParallel& choice, TrainerStrategy::Given given);
std::unique_ptr<TrainerStrategy> make(const strategy::Pipeline& choice, TrainerStrategy::Given given);

/// `given`, or the default group; null if there is none.
std::shared_ptr<ProcessGroup> group_or_default(const std::shared_ptr<ProcessGroup>& given);
/// All ranks of a strategy over two groups, of which `other` may be null: `world`, or what the default group is to
/// them.
std::shared_ptr<ProcessGroup> world_of(const char* strategy, const std::shared_ptr<ProcessGroup>& world,
                                       const std::shared_ptr<ProcessGroup>& group,
                                       const std::shared_ptr<ProcessGroup>& other);
/// Throws InvalidArgument if the optimizer has made steps, or divides its state already.
void require_fresh(const char* strategy, torch::optim::Optimizer& optimizer);
/// Throws InvalidArgument, saying which strategy fits, if ranks divide a parameter of the model.
void require_undivided(const char* strategy, torch::nn::Module& module);
/// Rank 0's values on all ranks of the group.
void broadcast_from_first(const std::vector<torch::Tensor>& tensors, const std::shared_ptr<ProcessGroup>& group);
/// "the loss is nan", or empty.
std::string nonfinite_loss(const torch::Tensor& loss);
/// "the gradient of parameter fc1.weight is not finite", after " and " if `text` is not empty.
void add_nonfinite_gradient(std::string& text, const std::string& name);

}  // namespace trainer
}  // namespace maniple
