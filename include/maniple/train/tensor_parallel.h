// Tensor parallelism: the matrices of a layer are divided over the ranks of a group, and each rank computes its part
// for every sample.
//
//   maniple::nn::ParallelTransformerBlock block(
//       maniple::nn::ParallelBlockOptions{.width = 512, .heads = 8, .group = tensor_group});
//   auto y = block(x);                                            // x: [batch, tokens, width], the same on all ranks
//
//   maniple::nn::ColumnParallelLinear up(512, 2048, maniple::nn::ColumnParallelOptions{.group = tensor_group});
//   maniple::nn::RowParallelLinear down(2048, 512, maniple::nn::RowParallelOptions{.group = tensor_group});
//   auto z = down(torch::gelu(up(x)));                            // one all_reduce in forward, one in backward
//
// Division. A column-parallel Linear holds the weights of some of its outputs, a row-parallel Linear the weights of
// some of its inputs. Attention layers divide their heads, embeddings their vocabulary. Shares are as equal as
// possible: an extent need not be divisible by the number of ranks, but every rank must get a share (otherwise
// InvalidArgument). Undivided parameters (norms, the bias of a row-parallel Linear) are replicated and have the same
// gradient on all ranks.
//
// Equivalence. Every layer draws its initial weights like LibTorch's undivided layer, and keeps its share. With the
// same seed on all ranks of the group the model equals the undivided one, and so do outputs and gradients, up to the
// order of additions (float32: about 1e-6 of the largest value). Parameters have the names of the undivided modules.
// Checkpoints with CheckpointOptions::sharded recognize the shards: a model saved by 4 ranks can be loaded by 2, or
// merged into one file.
//
// Sequence parallelism (sequence_parallel = true). Between the divided layers each rank holds some tokens of every
// sample, x: [batch, tokens / ranks, width]. This also divides norms and dropout, and their activations. The
// all_reduces become an all_gather and a reduce_scatter, which move the same number of bytes. scatter_to_group(x, 1)
// divides the tokens at the beginning, gather_from_group(x, 1) joins them at the end. The number of tokens must be
// divisible by the number of ranks.
//
// Random numbers. Seed all ranks of the group equally (manual_seed with the same number), and other data-parallel
// replicas differently. Plain dropout on replicated tensors then drops the same elements on all ranks. For divided
// tensors, use sharded_dropout, which drops different elements on each rank. It draws one number from LibTorch's
// generator, so the generators stay equal, checkpoints hold the complete random state, and activation checkpointing
// repeats the same dropout.
//
// Contract. All ranks of a tensor-parallel group call the same layers in the same order, with the same input. For data
// parallelism, use DistributedDataParallel over another group, whose ranks hold the same shard (another dimension of a
// mesh). A null group means the default group at the time when the layer is made.
//
// Errors. Shapes that do not fit throw InvalidArgument with a message of one line. Ranks that disagree or die cause the
// errors described in dist.h. Backward with create_graph throws Unsupported.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <torch/torch.h>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>
#include <maniple/train/sharded_checkpoint.h>

namespace MANIPLE_API maniple {

// ---- Collectives with autograd support ------------------------------------------------------------------------------

/// Returns the same tensor. Backward sums the gradients of all ranks. Use it where a replicated tensor enters a divided
/// layer.
torch::Tensor copy_to_group(const torch::Tensor& x, const std::shared_ptr<ProcessGroup>& group = nullptr);
/// The sum of all ranks' tensors. Backward passes the gradient of the sum to each rank.
torch::Tensor reduce_from_group(const torch::Tensor& x, const std::shared_ptr<ProcessGroup>& group = nullptr);
/// All ranks' shares concatenated along `dim`. In backward each rank takes its share of the gradient, which must be the
/// same on all ranks. `extent` is the size of the whole dimension; 0: all shares are equal.
torch::Tensor gather_from_group(const torch::Tensor& x, std::int64_t dim,
                                const std::shared_ptr<ProcessGroup>& group = nullptr, std::int64_t extent = 0);
/// This rank's share, along `dim`, of a tensor that is the same on all ranks. Backward concatenates the shares of the
/// gradient.
torch::Tensor scatter_to_group(const torch::Tensor& x, std::int64_t dim,
                               const std::shared_ptr<ProcessGroup>& group = nullptr);
/// Like gather_from_group, for a result that a divided layer uses: backward sums the gradients of all ranks, and each
/// rank takes its share.
torch::Tensor all_gather_from_group(const torch::Tensor& x, std::int64_t dim,
                                    const std::shared_ptr<ProcessGroup>& group = nullptr, std::int64_t extent = 0);
/// This rank's share of the sum of all ranks' tensors. Backward concatenates the shares of the gradient.
torch::Tensor reduce_scatter_to_group(const torch::Tensor& x, std::int64_t dim,
                                      const std::shared_ptr<ProcessGroup>& group = nullptr);

/// Dropout for divided tensors: see "Random numbers" above.
torch::Tensor sharded_dropout(const torch::Tensor& x, double p, bool training,
                              const std::shared_ptr<ProcessGroup>& group = nullptr);

/// The range of an extent that a rank holds. Ranges are as equal as possible and in rank order.
struct GroupShare {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};
GroupShare group_share(std::int64_t extent, int rank, int size);

struct VocabParallelLossOptions {
  std::int64_t ignore_index = -100;  ///< targets to ignore
  torch::Reduction::Reduction reduction = torch::Reduction::Mean;
  std::shared_ptr<ProcessGroup> group = nullptr;
};
/// Cross-entropy of divided logits. Each rank holds the share [..., vocabulary / ranks], the output of a
/// ColumnParallelLinear(width, vocabulary). Targets are [...] and the same on all ranks. The logits are never gathered:
/// only two numbers per sample are communicated. The result is the same on all ranks, equals
/// torch::nn::functional::cross_entropy, and is computed in float32 at least.
torch::Tensor vocab_parallel_cross_entropy(const torch::Tensor& logits, const torch::Tensor& targets,
                                           std::int64_t vocabulary, const VocabParallelLossOptions& options = {});

/// Totals of this process for the collectives above, including calls by the layers below.
struct TensorParallelStatistics {
  std::uint64_t operations = 0;
  std::uint64_t bytes = 0;  ///< size of this rank's inputs
};
TensorParallelStatistics tensor_parallel_statistics() noexcept;

namespace nn {

struct ColumnParallelOptions {
  bool bias = true;
  bool gather_output = false;      ///< true: every rank receives all outputs
  bool sequence_parallel = false;  ///< the input is this rank's share of dimension 1
  std::int64_t unit = 1;           ///< number of outputs that stay together on a rank, for example of an attention head
  std::shared_ptr<ProcessGroup> group = nullptr;
};

/// y = x W^T + b; this rank computes some columns of y. Parameters as in torch::nn::Linear.
class ColumnParallelLinearImpl : public torch::nn::Module, public ShardedModule {
 public:
  ColumnParallelLinearImpl(std::int64_t in_features, std::int64_t out_features, ColumnParallelOptions options = {});
  torch::Tensor forward(const torch::Tensor& x);
  std::optional<TensorShard> shard_of(const std::string& parameter) const override;
  void save(torch::serialize::OutputArchive& archive) const override;  ///< throws Unsupported for several ranks
  void load(torch::serialize::InputArchive& archive) override;         ///< throws Unsupported for several ranks

  ColumnParallelOptions options;
  torch::Tensor weight, bias;

 private:
  std::int64_t in_, out_;
  GroupShare share_;  // of the outputs
};
TORCH_MODULE(ColumnParallelLinear);

struct RowParallelOptions {
  bool bias = true;
  bool input_is_divided = true;    ///< false: the input is whole, and each rank takes its share
  bool sequence_parallel = false;  ///< the output is this rank's share of dimension 1
  std::int64_t unit = 1;           ///< number of inputs that stay together on a rank
  std::shared_ptr<ProcessGroup> group = nullptr;
};

/// y = x W^T + b; this rank holds some columns of x, and y is the sum over all ranks.
class RowParallelLinearImpl : public torch::nn::Module, public ShardedModule {
 public:
  RowParallelLinearImpl(std::int64_t in_features, std::int64_t out_features, RowParallelOptions options = {});
  torch::Tensor forward(const torch::Tensor& x);
  std::optional<TensorShard> shard_of(const std::string& parameter) const override;
  void save(torch::serialize::OutputArchive& archive) const override;  ///< throws Unsupported for several ranks
  void load(torch::serialize::InputArchive& archive) override;         ///< throws Unsupported for several ranks

  RowParallelOptions options;
  torch::Tensor weight, bias;

 private:
  std::int64_t in_, out_;
  GroupShare share_;  // of the inputs
};
TORCH_MODULE(RowParallelLinear);

struct VocabParallelOptions {
  bool sequence_parallel = false;  ///< the output is this rank's share of dimension 1
  std::shared_ptr<ProcessGroup> group = nullptr;
};

/// An embedding; this rank holds some rows. Ids are the same on all ranks. An id outside the vocabulary throws
/// InvalidArgument (on a GPU, LibTorch's embedding fails, on one rank).
class VocabParallelEmbeddingImpl : public torch::nn::Module, public ShardedModule {
 public:
  VocabParallelEmbeddingImpl(std::int64_t vocabulary, std::int64_t width, VocabParallelOptions options = {});
  torch::Tensor forward(const torch::Tensor& ids);
  std::optional<TensorShard> shard_of(const std::string& parameter) const override;
  void save(torch::serialize::OutputArchive& archive) const override;  ///< throws Unsupported for several ranks
  void load(torch::serialize::InputArchive& archive) override;         ///< throws Unsupported for several ranks

  VocabParallelOptions options;
  torch::Tensor weight;

 private:
  std::int64_t vocabulary_;
  GroupShare share_;
};
TORCH_MODULE(VocabParallelEmbedding);

/// LayerNorm over the last dimension, for inputs of which each rank holds some tokens. Gradients of its parameters are
/// summed over the ranks.
class SequenceParallelLayerNormImpl : public torch::nn::LayerNormImpl {
 public:
  explicit SequenceParallelLayerNormImpl(std::int64_t width, double eps = 1e-5,
                                         std::shared_ptr<ProcessGroup> group = nullptr);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  std::shared_ptr<ProcessGroup> group_;
};
TORCH_MODULE(SequenceParallelLayerNorm);

struct ParallelBlockOptions {
  std::int64_t width = 0;
  std::int64_t heads = 0;      ///< divides the width; at least one per rank
  std::int64_t mlp_width = 0;  ///< 0: 4 times the width
  double dropout = 0;          ///< in attention, and before each addition to the residual stream
  bool causal = true;          ///< each token attends only to itself and earlier tokens
  double layer_norm_epsilon = 1e-5;
  bool sequence_parallel = false;
  std::shared_ptr<ProcessGroup> group = nullptr;
};

/// Self-attention; this rank computes some of the heads. Submodules: query, key, value and proj, each a Linear(width,
/// width).
class ParallelAttentionImpl : public torch::nn::Module {
 public:
  explicit ParallelAttentionImpl(ParallelBlockOptions options);
  torch::Tensor forward(const torch::Tensor& x);

  ParallelBlockOptions options;
  ColumnParallelLinear query{nullptr}, key{nullptr}, value{nullptr};
  RowParallelLinear proj{nullptr};
};
TORCH_MODULE(ParallelAttention);

/// A pre-norm transformer block: x + attention(norm1(x)), then x + mlp(norm2(x)) with GELU. Submodules: norm1,
/// attention, norm2, fc, proj.
class ParallelTransformerBlockImpl : public torch::nn::Module {
 public:
  explicit ParallelTransformerBlockImpl(ParallelBlockOptions options);
  torch::Tensor forward(const torch::Tensor& x);

  ParallelBlockOptions options;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  ParallelAttention attention{nullptr};
  ColumnParallelLinear fc{nullptr};
  RowParallelLinear proj{nullptr};

 private:
  torch::Tensor norm(torch::nn::LayerNorm& which, const torch::Tensor& x) const;
  torch::Tensor dropped(const torch::Tensor& x) const;
};
TORCH_MODULE(ParallelTransformerBlock);

}  // namespace nn
}  // namespace maniple
