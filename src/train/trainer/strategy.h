// How a Trainer computes and communicates. Each alternative of Strategy has a class, so that the loop in trainer.cpp is
// the same for all.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <maniple/train/accumulation.h>
#include <maniple/train/trainer.h>

namespace maniple {

/// Replicates the whole model and averages gradients by DistributedDataParallel; without a group, trains in this
/// process alone. The other strategies derive from this class.
class TrainerStrategy {
 public:
  struct Given {
    detail::TrainerModel model;
    torch::optim::Optimizer& optimizer;
    std::function<std::shared_ptr<void>()> autocast;
  };
  /// Maps the loss of a batch to the loss for backward: divided for accumulation, multiplied by a GradScaler. Called
  /// once per batch.
  using Scaled = std::function<torch::Tensor(const torch::Tensor&)>;

  /// Collective. Throws InvalidArgument, before anything is changed, if the strategy cannot train `given`.
  static std::unique_ptr<TrainerStrategy> make(const TrainerOptions& options, Given given);
  /// `averaged_over`: the ranks of DistributedDataParallel; null if it is not used.
  TrainerStrategy(Given given, std::shared_ptr<ProcessGroup> world, std::shared_ptr<ProcessGroup> averaged_over = {},
                  DdpOptions ddp = {});
  virtual ~TrainerStrategy();

  const std::shared_ptr<ProcessGroup>& world() const noexcept { return world_; }  ///< null: this process alone
  int ranks() const { return world_ ? world_->size() : 1; }
  virtual int data_ranks() const { return ranks(); }  ///< how many ranks have different batches
  /// The virtual ranks of this rank; null without virtual ranks.
  virtual const VirtualRanks* virtual_ranks() const { return nullptr; }
  virtual bool reports() const { return true; }         ///< whether this rank's metrics count
  virtual bool divides_model() const { return false; }  ///< if true, no rank can save the model alone
  /// The ranks that have different batches and communicate in forward, also in an evaluation in which some have fewer
  /// batches. Null if there are none.
  virtual ProcessGroup* forward_group() const { return nullptr; }
  /// The ranks that compute on the same batches. Null if there are none.
  virtual ProcessGroup* same_batches() const { return nullptr; }

  virtual torch::nn::Module& module() { return *given_.model.module; }       ///< the module that checkpoints contain
  virtual torch::optim::Optimizer& optimizer() { return given_.optimizer; }  ///< the optimizer that steps
  detail::DdpBase* ddp() const noexcept { return ddp_.get(); }  ///< null if DistributedDataParallel is not used

  /// Called when fit() or evaluate() begins; it keeps the result until it ends.
  virtual std::shared_ptr<void> begin() { return nullptr; }
  /// Throws InvalidArgument if the strategy cannot compute the loss of such data. With virtual ranks, divides the data
  /// over them.
  virtual void require_usable(const detail::TrainerData& data) const;
  /// Collective over same_batches(). Throws InvalidArgument on all these ranks if their batches differ.
  void require_same_batch(const detail::TrainerBatch& batch) const;
  virtual Accumulation accumulation(int batches);
  /// Called with each batch of a training, and verifies once that all ranks compute the same from the same batch.
  /// Collective.
  virtual void verify_bits(const detail::TrainerBatch&) {}
  /// All ranks have been verified before.
  virtual void assume_same_bits() {}
  /// Called before the first batch of a step, and when the step is committed.
  virtual void begin_step() {}
  virtual void end_step() {}
  /// Restores what the batches of an uncommitted step have changed.
  virtual void undo_step() {}
  /// Called before and after the forward of a batch, and in training its backward. `turn` counts the batches of a step
  /// on this rank.
  virtual void begin_batch(std::int64_t /*step*/, int /*turn*/) {}
  virtual void end_batch() {}
  /// Runs forward, with a graph if grad mode is on.
  virtual torch::Tensor loss_of(const detail::TrainerBatch& batch, Metrics& metrics);
  /// Runs forward and backward. Returns the loss, detached and unscaled.
  virtual torch::Tensor backward(const detail::TrainerBatch& batch, Metrics& metrics, const Scaled& scaled);
  /// Called after the backward of a step, before clipping.
  virtual void finish_backward() {}
  /// take_options() copies the options in param_groups() from the program's optimizer to the one that steps, before a
  /// step or a save. give_options() copies them back, after a load.
  virtual void take_options() {}
  virtual void give_options() {}
  /// What the bits of the results depend on, for checkpoints; empty if the strategy promises nothing.
  virtual std::string bits_text() const { return {}; }
  /// Throws InvalidArgument if the checkpoint was saved under conditions that give other bits.
  virtual void load_bits_text(const std::string&) {}
  /// Which values are not finite on this rank when it computes the batch; empty if all are. Collective; gradients are
  /// undefined afterwards.
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

std::unique_ptr<TrainerStrategy> make(const strategy::DataParallel& choice, TrainerStrategy::Given given);
std::unique_ptr<TrainerStrategy> make(const strategy::Zero1& choice, TrainerStrategy::Given given);
std::unique_ptr<TrainerStrategy> make(const strategy::FullySharded& choice, TrainerStrategy::Given given);
std::unique_ptr<TrainerStrategy> make(const strategy::TensorParallel& choice, TrainerStrategy::Given given);
std::unique_ptr<TrainerStrategy> make(const strategy::Pipeline& choice, TrainerStrategy::Given given);
std::unique_ptr<TrainerStrategy> make_over_virtual_ranks(const TrainerOptions& options, TrainerStrategy::Given given);

/// `given`, or the default group if `given` is null; null if there is neither.
std::shared_ptr<ProcessGroup> group_or_default(const std::shared_ptr<ProcessGroup>& given);
/// All ranks of a strategy over several groups, all but the first of which may be null: `world` if it is given, else
/// the first group if the others have one rank, else the default group. Throws InvalidArgument if none of them has the
/// right size.
std::shared_ptr<ProcessGroup> world_of(const char* strategy, const std::shared_ptr<ProcessGroup>& world,
                                       const std::vector<std::shared_ptr<ProcessGroup>>& groups);
/// Throws InvalidArgument if the optimizer has made steps or already divides its state.
void require_fresh(const char* strategy, torch::optim::Optimizer& optimizer);
/// Throws InvalidArgument, naming the strategy that fits, if ranks divide a parameter of the model.
void require_undivided(const char* strategy, torch::nn::Module& module);
/// Sets the tensors to rank 0's values on all ranks of the group.
void broadcast_from_first(const std::vector<torch::Tensor>& tensors, const std::shared_ptr<ProcessGroup>& group);
/// "the loss is nan", or empty.
std::string nonfinite_loss(const torch::Tensor& loss);
/// Appends "the gradient of parameter fc1.weight is not finite" to `text`, after " and " if `text` is not empty.
void add_nonfinite_gradient(std::string& text, const std::string& name);

}  // namespace trainer
}  // namespace maniple
