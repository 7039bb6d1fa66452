// Pipeline parallelism: a model is cut into stages over the ranks of a group. A batch passes through them in
// micro-batches, so that all ranks compute at the same time.
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
// Stages    With p ranks and v stages per rank there are p x v stages; stage s is on rank s % p. A stage is a module
//           from one tensor to one tensor, in a torch::nn::AnyModule: `{torch::nn::AnyModule(Encoder())}` on rank 0,
//           `{torch::nn::AnyModule(Decoder())}` on rank 1. Stages may differ in size and in the shapes and dtypes of
//           their results. A rank receives on the device of its stages (the CPU or a GPU).
// Step      The batch is cut along dimension 0, as by torch::chunk: 10 rows in 4 micro-batches become 3, 3, 3 and 1.
//           With fewer rows than micro-batches, each row is a micro-batch. `loss` returns the mean over the rows of a
//           micro-batch. Micro-batches are weighted by their rows, so the loss is the mean over the batch, and the
//           gradients are its gradients. They are added to `grad`, as by any backward. Only the rank of the first stage
//           uses the input, and only the rank of the last stage uses the target; other ranks may pass anything.
// Exact     With every schedule, gradients equal, bit for bit, the gradients of one process that computes the same
//           micro-batches one after the other. Gradients of tied parameters, and averages over data_group, are summed
//           in another order and equal up to rounding. (Modules that depend on the whole batch, such as batch norm, see
//           micro-batches. Each rank draws its own random numbers.)
// Messages  Activations and gradients are sent while the next micro-batch is computed, and receives are posted ahead.
//           Shapes are sent in the first step, and again when rows, shapes, dtypes, train(), requires_grad or autocast
//           change on some rank; other steps reuse them. GPU tensors are staged through host memory with every backend:
//           NCCL matches messages by their order, which differs between the ranks here.
// Data      For data parallelism on top, `data_group` holds the ranks with the same stages in other pipelines.
//           DistributedDataParallel's reducer averages gradients over it, once per step, in the backward of the last
//           micro-batch.
// Tied      Parameters that several ranks hold under one name. All copies start with the first rank's values, and their
//           gradients are summed, so that equal optimizers keep the copies equal.
// Saving    With CheckpointOptions::sharded, like any module and its optimizer. If parameter names differ between
//           stages (as after cut_into_stages), checkpoints store them without "stage1.", so that another number of
//           stages, or the undivided Sequential, can load them.
//
// Errors. A wrong call (different numbers of rows, a missing loss, a schedule that does not fit) throws InvalidArgument
// on all ranks before anything is computed; the pipeline stays usable. If a stage throws, the step ends on all ranks:
// its own rank throws the original error, the others throw Aborted, which names stage, rank and micro-batch. A killed
// rank is reported as PeerLost. `group` stays usable unless a rank is lost. data_group is aborted, because the other
// pipelines would wait for this one. After such an error make a new Pipeline.
//
// Threads: one thread at a time. The Pipeline makes its own group from the ranks of `group`, so `group` may be used for
// other operations between steps.
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

/// The order in which a rank computes. With p ranks, m micro-batches and v stages per rank, all of equal duration, a
/// rank is idle for (p-1) / (m+p-1) of a step; with `interleaved`, (p-1) / (v m+p-1).
enum class PipelineSchedule : std::uint8_t {
  gpipe,        ///< all forwards, then all backwards; keeps the activations of all micro-batches
  one_f_one_b,  ///< alternates forward and backward; keeps activations of at most p micro-batches. One stage per rank
  interleaved,  ///< like one_f_one_b, with several stages per rank: less idle time, more messages
};

struct PipelineOptions {
  std::int64_t micro_batches = 4;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  /// The mean loss over the rows of a micro-batch, from the last stage's output and the target. Required on the rank of
  /// the last stage.
  std::function<torch::Tensor(const torch::Tensor& output, const torch::Tensor& target)> loss = nullptr;
  /// Stages keep only their inputs and repeat forward during backward: see activation_checkpoint.h.
  bool activation_checkpointing = false;
  /// Sends shapes with every message. Required if shapes depend on the values in a batch; without it that is an error.
  bool dynamic_shapes = false;
  /// The ranks of the pipeline. Null: the default group.
  std::shared_ptr<ProcessGroup> group = nullptr;
  /// Data parallelism: the ranks with the same stages in other pipelines. Null: none.
  std::shared_ptr<ProcessGroup> data_group = nullptr;
  DdpOptions ddp = {};  ///< for the average over data_group; leave its `group` unset
  /// Parameters of this rank's stages that other ranks hold, too, under a name common to these ranks.
  NamedTensors tied = {};
};

/// Time spent in the steps of a pipeline on this rank: sums over all steps, in milliseconds.
struct PipelineStatistics {
  std::uint64_t steps = 0;
  double step_ms = 0;     ///< from the start of the first action to the end of the last
  double compute_ms = 0;  ///< the part of step_ms in forward and backward of stages
  double cpu_ms = 0;      ///< CPU time of this thread in compute_ms; less than compute_ms if others use the core
  double wait_ms = 0;     ///< the part of step_ms waiting for other ranks' activations and gradients
  std::uint64_t sent_bytes = 0;
  /// The fraction of a step in which this rank does not compute.
  double idle_fraction() const noexcept { return step_ms > 0 ? 1 - compute_ms / step_ms : 0; }
  std::string text() const;
};

class Pipeline : public torch::nn::Module, public PartialModule {
 public:
  /// `stages` are this rank's stages in order. They become the children "stage0", "stage3", ... by stage number.
  /// Collective over the group and over data_group. Throws InvalidArgument on all ranks if the ranks' options differ.
  Pipeline(std::vector<torch::nn::AnyModule> stages, PipelineOptions options);
  ~Pipeline() override;

  /// Runs forward and backward. Returns the mean loss over the batch on all ranks. Collective over the group.
  double step(const torch::Tensor& input, const torch::Tensor& target);
  /// Returns the same loss, without a graph and without backward.
  double evaluate(const torch::Tensor& input, const torch::Tensor& target);
  /// Without a graph. Returns the last stage's output on its rank, an undefined tensor elsewhere. Zero rows are
  /// allowed.
  torch::Tensor forward(const torch::Tensor& input);

  /// This rank's parameters that require a gradient, each once, for optimizers. (parameters() repeats parameters shared
  /// by stages.)
  std::vector<torch::Tensor> trained_parameters() const;
  int stages() const noexcept;  ///< over all ranks
  bool has_first_stage() const noexcept;
  bool has_last_stage() const noexcept;
  const PipelineStatistics& statistics() const noexcept;

  /// Name in checkpoints: "stage1.3.weight" becomes "3.weight", unless stages have names in common.
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
  torch::Tensor sample = {};             ///< balance stages by measured time, see BalanceOptions; default: by bytes
  ComputeDevice device = torch::kCPU;    ///< device for the measurement
  std::vector<std::size_t> begins = {};  ///< the first layer of each stage; overrides balancing
};

/// This rank's stages of a Sequential, and its parameters that stages of other ranks use, too.
struct StageCut {
  std::vector<torch::nn::AnyModule> stages;
  NamedTensors tied;
  std::vector<std::size_t> begins;  ///< the first layer of each stage, for all ranks
};

/// Cuts a Sequential into stages. Every rank passes the whole Sequential, and may drop it afterwards to free the layers
/// of other ranks. Parameters in stages keep their names in the Sequential ("3.weight"). Collective over the group if
/// `sample` is given.
StageCut cut_into_stages(const torch::nn::Sequential& layers, const StageCutOptions& options = {});

}  // namespace maniple
