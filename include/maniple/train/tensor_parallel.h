// Tensor parallelism: the matrices of one layer divided over the ranks of a group, each of which computes its part of
// every sample.
//
//   maniple::nn::ParallelTransformerBlock block(
//       maniple::nn::ParallelBlockOptions{.width = 512, .heads = 8, .group = tensor_group});
//   auto y = block(x);                                            // x: [batch, tokens, width], the same on all ranks
//
//   maniple::nn::ColumnParallelLinear up(512, 2048, maniple::nn::ColumnParallelOptions{.group = tensor_group});
//   maniple::nn::RowParallelLinear down(2048, 512, maniple::nn::RowParallelOptions{.group = tensor_group});
//   auto z = down(torch::gelu(up(x)));                            // one all_reduce in forward, one in backward
//
// Who holds what. A column-parallel Linear has the weights of some of its outputs, a row-parallel one those of some of
// its inputs; attention has some of the heads, an embedding some of the vocabulary. Ranks get as equal shares as there
// can be: extents need not be divisible by the number of ranks, but each rank gets something (InvalidArgument
// otherwise). What is not divided (norms, the bias behind a row-parallel Linear) is replicated, and has the same
// gradient on all ranks.
//
// The same as undivided. Every layer draws its initial weights as LibTorch's undivided one does, and keeps its share:
// with the same seed on all ranks of the group the model is the undivided one, and so are outputs and gradients, but
// for the order of additions (float32: about 1e-6 of the largest value). Parameters have the names of the undivided
// modules, and checkpoints with CheckpointOptions::sharded know their shards: saved with 4 ranks, loaded with 2, or
// merged into one file.
//
// Sequence parallelism (sequence_parallel = true). Between the divided layers each rank has some of the tokens of every
// sample, x: [batch, tokens / ranks, width], so that norms and dropout, and their activations, are divided, too. The
// all_reduces become an all_gather and a reduce_scatter, which move as much. scatter_to_group(x, 1) divides the tokens
// at the beginning, gather_from_group(x, 1) puts them together at the end. The number of tokens must be divisible by
// the number of ranks.
//
// Random numbers. The ranks of the group are seeded equally (manual_seed with the same number; those of other
// data-parallel replicas with another). Plain dropout on what is replicated then drops the same elements on all ranks.
// On what is divided, sharded_dropout drops different ones on each rank; it takes one number of LibTorch's generator,
// so the generators stay equal, checkpoints hold all there is to hold, and activation checkpointing repeats it.
//
// With data parallelism: DistributedDataParallel over another group, whose ranks hold the same shard (another dimension
// of a mesh). All ranks of a tensor-parallel group call the same layers in the same order, with the same input. A null
// group is the default group when the layer is made.
//
// Errors. InvalidArgument with one line for shapes that do not fit; what dist.h says for ranks that disagree or die.
// Unsupported for backward with create_graph.
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

// ---- Collectives that autograd knows --------------------------------------------------------------------------------

/// The same tensor. In backward the gradients of all ranks are added up: for what is replicated and enters a divided
/// layer.
torch::Tensor copy_to_group(const torch::Tensor& x, const std::shared_ptr<ProcessGroup>& group = nullptr);
/// The sum of all ranks' tensors. In backward each has the gradient of the sum.
torch::Tensor reduce_from_group(const torch::Tensor& x, const std::shared_ptr<ProcessGroup>& group = nullptr);
/// All ranks' shares along a dimension, put together. In backward each rank takes its share of the gradient, which must
/// be the same on all ranks. `extent`: of the whole; 0: all shares are equal.
torch::Tensor gather_from_group(const torch::Tensor& x, std::int64_t dim,
                                const std::shared_ptr<ProcessGroup>& group = nullptr, std::int64_t extent = 0);
/// This rank's share along a dimension of a tensor that all have. In backward the shares of the gradient are put
/// together.
torch::Tensor scatter_to_group(const torch::Tensor& x, std::int64_t dim,
                               const std::shared_ptr<ProcessGroup>& group = nullptr);
/// As gather_from_group, for what a divided layer then uses: in backward the gradients of all ranks are added up, and
/// each takes its share.
torch::Tensor all_gather_from_group(const torch::Tensor& x, std::int64_t dim,
                                    const std::shared_ptr<ProcessGroup>& group = nullptr, std::int64_t extent = 0);
/// This rank's share of the sum of all ranks' tensors. In backward the shares of the gradient are put together.
torch::Tensor reduce_scatter_to_group(const torch::Tensor& x, std::int64_t dim,
                                      const std::shared_ptr<ProcessGroup>& group = nullptr);

/// Dropout on what is divided: see "Random numbers" above.
torch::Tensor sharded_dropout(const torch::Tensor& x, double p, bool training,
                              const std::shared_ptr<ProcessGroup>& group = nullptr);

/// Which part of an extent a rank has: as equal as there can be, in the order of ranks.
struct GroupShare {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};
GroupShare group_share(std::int64_t extent, int rank, int size);

struct VocabParallelLossOptions {
  std::int64_t ignore_index = -100;  ///< targets that count for nothing
  torch::Reduction::Reduction reduction = torch::Reduction::Mean;
  std::shared_ptr<ProcessGroup> group = nullptr;
};
/// Cross-entropy of logits of which each rank has the share [..., vocabulary / ranks] (what a
/// ColumnParallelLinear(width, vocabulary) gives); targets are [...] and the same on all ranks. They are never put
/// together: two numbers of each sample travel. The result, as torch::nn::functional::cross_entropy's, is the same on
/// all ranks; computed in float32 at least.
torch::Tensor vocab_parallel_cross_entropy(const torch::Tensor& logits, const torch::Tensor& targets,
                                           std::int64_t vocabulary, const VocabParallelLossOptions& options = {});

/// What this process has given to the collectives above, and to those of the layers below, so far.
struct TensorParallelStatistics {
  std::uint64_t operations = 0;
  std::uint64_t bytes = 0;  ///< of this rank's input to them
};
TensorParallelStatistics tensor_parallel_statistics() noexcept;

namespace nn {

struct ColumnParallelOptions {
  bool bias = true;
  bool gather_output = false;      ///< true: every rank gets all outputs
  bool sequence_parallel = false;  ///< the input is this rank's share of dimension 1
  std::int64_t unit = 1;           ///< outputs that stay together on a rank: those of an attention head, say
  std::shared_ptr<ProcessGroup> group = nullptr;
};

/// y = x W^T + b, of which this rank computes some columns of y. Parameters as torch::nn::Linear's.
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
  std::int64_t unit = 1;           ///< inputs that stay together on a rank
  std::shared_ptr<ProcessGroup> group = nullptr;
};

/// y = x W^T + b, of which this rank has some columns of x; the sum over all ranks is y.
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

/// An embedding of which this rank has some rows. Ids are the same on all ranks; one outside the vocabulary throws
/// InvalidArgument. (On a GPU it is LibTorch's embedding that fails, on one rank.)
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

/// LayerNorm over the last dimension of what each rank has some tokens of. The gradients of its parameters are added up
/// over the ranks.
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
  std::int64_t heads = 0;      ///< divides the width; at least one for each rank
  std::int64_t mlp_width = 0;  ///< 0: 4 times the width
  double dropout = 0;          ///< of attention, and of what is added to the residual stream
  bool causal = true;          ///< tokens see those before them only
  double layer_norm_epsilon = 1e-5;
  bool sequence_parallel = false;
  std::shared_ptr<ProcessGroup> group = nullptr;
};

/// Self-attention; this rank computes some of the heads. Modules: query, key, value and proj, each a Linear(width,
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

/// A pre-norm transformer block: x + attention(norm1(x)), then x + mlp(norm2(x)) with GELU. Modules: norm1, attention,
/// norm2, fc, proj.
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
