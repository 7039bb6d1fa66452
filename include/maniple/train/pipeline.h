// A model in stages over the ranks of a group: a batch goes through them in micro-batches, so that all ranks compute at
// once.
//
//   auto group = maniple::get_default_group();
//   auto loss_of = [](const auto& y, const auto& t) { return torch::cross_entropy_loss(y, t); };
//   auto cut = maniple::cut_into_stages(layers, {.group = group});         // a Sequential; or stages made by hand
//   maniple::Pipeline pipeline(cut.stages, {.micro_batches = 8, .loss = loss_of, .group = group, .tied = cut.tied});
//   torch::optim::AdamW optimizer(pipeline.trained_parameters(), 1e-3);    // this rank's parameters
//   for (auto& batch : *loader) {
//     optimizer.zero_grad();
//     // forward and backward; the same on all ranks
//     const double loss = pipeline.step(batch.data, batch.target);
//     optimizer.step();
//   }
//
// Stages    With p ranks and v stages for each there are p x v; stage s is on rank s % p. Each is a module from one
//           tensor to one tensor, in a torch::nn::AnyModule: `{torch::nn::AnyModule(Encoder())}` on rank 0,
//           `{torch::nn::AnyModule(Decoder())}` on rank 1. They may differ in size, and in the shapes and dtypes of
//           what they return. Where a rank's stages are (CPU, a GPU) is where it receives.
// Step      The batch is cut along dimension 0 as torch::chunk does it: 10 rows in 4 micro-batches are 3, 3, 3 and 1;
//           fewer rows than micro-batches are as many micro-batches as rows. `loss` returns the mean over the rows of a
//           micro-batch; each counts by its rows, so the loss is the mean over the batch, and gradients are its
//           gradients. They are added to `grad`, as by any backward. Only the rank of the first stage uses the input,
//           only that of the last one the target; others may pass anything.
// Exact     Gradients have the bits of one process that goes through the same micro-batches one after the other, with
//           every schedule. (Modules that look at the whole batch, as batch norm does, see micro-batches. Random
//           numbers are each rank's own.)
// Messages  Activations and gradients are sent while the next micro-batch is computed, and receives are posted ahead.
// Shapes are sent
//           along in the first step, and again when rows, shapes, dtypes, train(), requires_grad or autocast change on
//           some rank; later steps know them. Tensors of a GPU go through memory of the host, whatever the backend:
//           NCCL matches messages by their order, which differs between the ranks here.
// Data      parallelism on top: `data_group` is the group of the ranks that have the same stages in other pipelines.
//           Gradients are averaged over it by DistributedDataParallel's machinery in the backward of the last
//           micro-batch, once in a step.
// Tied      parameters, on several ranks under one name: all begin with the values of the first, and their gradients
//           are added, so that equal optimizers keep them equal.
// Saving    with CheckpointOptions::sharded, as any module and its optimizer. Where the names of parameters differ
//           between stages (those of cut_into_stages do), they are in the checkpoint without "stage1.": another number
//           of stages, or the undivided Sequential, loads it.
//
// Errors. What is wrong with a call (rows that differ, no loss, a schedule that does not fit) is an InvalidArgument on
// all ranks, before anything is computed; the pipeline stays usable. A stage that throws ends the step on all ranks:
// there it is thrown as it is, elsewhere as Aborted, naming stage, rank and micro-batch. A killed rank is PeerLost.
// `group` stays usable where no rank is lost; data_group is aborted, as the other pipelines would wait for this one.
// Make a new Pipeline then.
//
// Threads: one at a time. It makes a group of its own of the ranks of `group`, so that one may be used for other things
// between steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>
#include <maniple/train/ddp.h>
#include <maniple/train/placement.h>
#include <maniple/train/sharded_checkpoint.h>

namespace MANIPLE_API maniple {

/// In which order a rank computes. With p ranks, m micro-batches and v stages of each rank, all of equal time, a rank
/// stands idle for (p-1) / (m+p-1) of a step; interleaved, (p-1) / (v m+p-1).
enum class PipelineSchedule : std::uint8_t {
  gpipe,        ///< all forwards, then all backwards: keeps the activations of all micro-batches
  one_f_one_b,  ///< one forward, one backward, in turn: keeps those of at most p micro-batches. One stage for each rank
  interleaved,  ///< the same with several stages for each rank: less idle, more messages
};

struct PipelineOptions {
  std::int64_t micro_batches = 4;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  /// The mean over the rows of a micro-batch, of the last stage's output and the target. Needed on the rank of the last
  /// stage.
  std::function<torch::Tensor(const torch::Tensor& output, const torch::Tensor& target)> loss = nullptr;
  /// Stages keep their inputs only and compute forward again in backward: see activation_checkpoint.h.
  bool activation_checkpointing = false;
  /// Shapes are sent with every message. Needed where shapes depend on the values in a batch, which is an error
  /// otherwise.
  bool dynamic_shapes = false;
  /// The ranks of the pipeline. Null: the default group.
  std::shared_ptr<ProcessGroup> group = nullptr;
  /// Data parallelism: the ranks that have the same stages as this one. Null: none.
  std::shared_ptr<ProcessGroup> data_group = nullptr;
  DdpOptions ddp = {};  ///< of the average over data_group; leave its `group` unset
  /// Parameters of this rank's stages that live on other ranks, too, by a name that is the same there.
  NamedTensors tied = {};
};

/// What a pipeline's steps took on this rank: sums over all steps, in milliseconds.
struct PipelineStatistics {
  std::uint64_t steps = 0;
  double step_ms = 0;     ///< from the beginning of the first action to the end of the last
  double compute_ms = 0;  ///< of it, in forward and backward of stages
  double cpu_ms = 0;      ///< processor time of this thread in compute_ms: less where others use the core
  double wait_ms = 0;     ///< of step_ms, waiting for other ranks' activations and gradients
  std::uint64_t sent_bytes = 0;
  /// The part of a step in which this rank does not compute.
  double idle_fraction() const noexcept { return step_ms > 0 ? 1 - compute_ms / step_ms : 0; }
  std::string text() const;
};

class Pipeline : public torch::nn::Module, public PartialModule {
 public:
  /// `stages` are those of this rank, in their order; they become its children "stage0", "stage3", ... by their
  /// numbers. Collective over the group, and over data_group. Throws InvalidArgument on all ranks if ranks disagree
  /// about the options.
  Pipeline(std::vector<torch::nn::AnyModule> stages, PipelineOptions options);
  ~Pipeline() override;

  /// Forward and backward. Returns the mean loss over the batch on all ranks. Collective over the group.
  double step(const torch::Tensor& input, const torch::Tensor& target);
  /// The same loss without a graph and without backward.
  double evaluate(const torch::Tensor& input, const torch::Tensor& target);
  /// Without a graph: the last stage's output on its rank, an undefined tensor elsewhere. Zero rows are fine.
  torch::Tensor forward(const torch::Tensor& input);

  /// This rank's parameters that require a gradient, each once, for optimizers: parameters() has those that stages
  /// share several times.
  std::vector<torch::Tensor> trained_parameters() const;
  int stages() const noexcept;  ///< of all ranks
  bool has_first_stage() const noexcept;
  bool has_last_stage() const noexcept;
  const PipelineStatistics& statistics() const noexcept;

  /// For checkpoints: "stage1.3.weight" is "3.weight" there, unless stages have names in common.
  std::string checkpoint_name(const std::string& name) const override;
  const std::set<std::string>& names_of_all_ranks() const override;
  const std::shared_ptr<ProcessGroup>& divided_over() const override;

  void save(torch::serialize::OutputArchive& archive) const override;  ///< throws Unsupported: use Checkpoint
  void load(torch::serialize::InputArchive& archive) override;         ///< throws Unsupported: use Checkpoint
  /// Throws InvalidArgument: move the stages before the Pipeline is made.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

struct StageCutOptions {
  std::shared_ptr<ProcessGroup> group = nullptr;  ///< the ranks of the pipeline; null: the default group
  std::size_t stages_per_rank = 1;
  torch::Tensor sample = {};             ///< cut by measured time, see BalanceOptions; otherwise by bytes
  ComputeDevice device = torch::kCPU;    ///< where it is measured
  std::vector<std::size_t> begins = {};  ///< the first layer of each stage, if you know better
};

/// The stages of a Sequential that are this rank's, and its parameters that are on other ranks' stages, too.
struct StageCut {
  std::vector<torch::nn::AnyModule> stages;
  NamedTensors tied;
  std::vector<std::size_t> begins;  ///< the first layer of each stage, of all ranks
};

/// Every rank gives the whole Sequential, and may drop it afterwards: with it goes what is not its own. Parameters in
/// stages have the names that they have in the Sequential ("3.weight"). Collective over the group where `sample` is
/// given.
StageCut cut_into_stages(const torch::nn::Sequential& layers, const StageCutOptions& options = {});

}  // namespace maniple
