#include <cmath>

#include "comm/base/check.h"
#include <maniple/dist.h>
#include <maniple/train/tensor_layout.h>
#include <maniple/train/tensor_parallel.h>

namespace maniple::nn {
namespace {

using torch::Tensor;

/// This rank's share of an extent; each `unit` consecutive elements stay together.
GroupShare share_of(std::shared_ptr<ProcessGroup>& group, const char* layer, const char* what, std::int64_t extent,
                    std::int64_t unit = 1) {
  if (!group) group = get_default_group();
  group->require_member(layer);
  MANIPLE_REQUIRE(unit >= 1 && extent % unit == 0, "{}: {} {} in units of {}: it must be a multiple", layer, extent,
                  what, unit);
  MANIPLE_REQUIRE(extent / unit >= group->size(), "{}: {} {} cannot be divided over {} ranks{}", layer, extent / unit,
                  unit == 1 ? what : "units", group->size(), unit == 1 ? "" : format_text(" ({} {} each)", unit, what));
  const GroupShare units = group_share(extent / unit, group->rank(), group->size());
  return {units.begin * unit, units.count * unit};
}

void require_input(const char* layer, const Tensor& x, std::int64_t expected) {
  MANIPLE_REQUIRE(x.dim() >= 1 && x.size(-1) == expected, "{}: input of [{}]; expected {} in the last dimension", layer,
                  joined(x.sizes()), expected);
}

Tensor kept(const Tensor& whole, std::int64_t dim, const GroupShare& share) {
  const torch::NoGradGuard no_grad;
  return whole.narrow(dim, share.begin, share.count).clone(torch::MemoryFormat::Contiguous);
}

/// Marks a parameter of which this rank holds a share along a dimension.
void divide(const Tensor& parameter, std::int64_t dim, const GroupShare& share, std::int64_t extent,
            const std::shared_ptr<ProcessGroup>& group, const char* layer) {
  set_layout(parameter, {.kind = LayoutKind::tensor_parallel,
                         .divided_over = {group},
                         .owner = layer,
                         .shard = TensorShard::along("", parameter, dim, share.begin, extent)});
}

[[noreturn]] void refuse_archive(const char* function, const char* layer) {
  throw Unsupported(
      format_text("{} of a {}: each rank holds a part; use Checkpoint with CheckpointOptions::sharded, or "
                  "full_parameters on all ranks",
                  function, layer));
}

/// The input of layers that are divided by their outputs.
Tensor entering(const Tensor& x, bool sequence_parallel, const std::shared_ptr<ProcessGroup>& group) {
  return sequence_parallel ? all_gather_from_group(x, 1, group) : copy_to_group(x, group);
}

void require_divisible(const Tensor& x, const std::shared_ptr<ProcessGroup>& group, const char* layer) {
  MANIPLE_REQUIRE(x.dim() >= 2 && x.size(1) % group->size() == 0,
                  "{}: {} tokens cannot be divided evenly over {} ranks, as sequence_parallel needs", layer,
                  x.dim() >= 2 ? x.size(1) : 0, group->size());
}

}  // namespace

ColumnParallelLinearImpl::ColumnParallelLinearImpl(std::int64_t in_features, std::int64_t out_features,
                                                   ColumnParallelOptions given)
    : options(std::move(given)), in_(in_features), out_(out_features) {
  share_ = share_of(options.group, "ColumnParallelLinear", "outputs", out_, options.unit);
  MANIPLE_REQUIRE(!options.gather_output || options.unit == 1 || out_ / options.unit % options.group->size() == 0,
                  "ColumnParallelLinear: gather_output with units of {} needs as many of them on each rank",
                  options.unit);
  const torch::nn::Linear whole(torch::nn::LinearOptions(in_, out_).bias(options.bias));
  weight = register_parameter("weight", kept(whole->weight, 0, share_));
  divide(weight, 0, share_, out_, options.group, "ColumnParallelLinear");
  if (!options.bias) return;
  bias = register_parameter("bias", kept(whole->bias, 0, share_));
  divide(bias, 0, share_, out_, options.group, "ColumnParallelLinear");
}

Tensor ColumnParallelLinearImpl::forward(const Tensor& x) {
  require_input("ColumnParallelLinear", x, in_);
  const Tensor y = torch::linear(entering(x, options.sequence_parallel, options.group), weight, bias);
  return options.gather_output ? gather_from_group(y, -1, options.group, out_) : y;
}

std::optional<TensorShard> ColumnParallelLinearImpl::shard_of(const std::string& parameter) const {
  return TensorShard::along(parameter, parameter == "weight" ? weight : bias, 0, share_.begin, out_);
}
void ColumnParallelLinearImpl::save(torch::serialize::OutputArchive& archive) const {
  if (options.group->size() > 1) refuse_archive("torch::save", "ColumnParallelLinear");
  torch::nn::Module::save(archive);
}
void ColumnParallelLinearImpl::load(torch::serialize::InputArchive& archive) {
  if (options.group->size() > 1) refuse_archive("torch::load", "ColumnParallelLinear");
  torch::nn::Module::load(archive);
}

RowParallelLinearImpl::RowParallelLinearImpl(std::int64_t in_features, std::int64_t out_features,
                                             RowParallelOptions given)
    : options(std::move(given)), in_(in_features), out_(out_features) {
  share_ = share_of(options.group, "RowParallelLinear", "inputs", in_, options.unit);
  const torch::nn::Linear whole(torch::nn::LinearOptions(in_, out_).bias(options.bias));
  weight = register_parameter("weight", kept(whole->weight, 1, share_));
  divide(weight, 1, share_, in_, options.group, "RowParallelLinear");
  if (options.bias) bias = register_parameter("bias", whole->bias.detach().clone());
}

Tensor RowParallelLinearImpl::forward(const Tensor& x) {
  require_input("RowParallelLinear", x, options.input_is_divided ? share_.count : in_);
  Tensor mine = x;
  if (!options.input_is_divided) {
    // Like scatter_to_group, but in whole units.
    mine = copy_to_group(x, options.group).narrow(-1, share_.begin, share_.count);
  }
  Tensor y = torch::linear(mine, weight);
  if (options.sequence_parallel) {
    require_divisible(y, options.group, "RowParallelLinear");
    y = reduce_scatter_to_group(y, 1, options.group);
    return bias.defined() ? y + copy_to_group(bias, options.group) : y;
  }
  y = reduce_from_group(y, options.group);
  return bias.defined() ? y + bias : y;
}

std::optional<TensorShard> RowParallelLinearImpl::shard_of(const std::string& parameter) const {
  if (parameter != "weight") return std::nullopt;
  return TensorShard::along(parameter, weight, 1, share_.begin, in_);
}
void RowParallelLinearImpl::save(torch::serialize::OutputArchive& archive) const {
  if (options.group->size() > 1) refuse_archive("torch::save", "RowParallelLinear");
  torch::nn::Module::save(archive);
}
void RowParallelLinearImpl::load(torch::serialize::InputArchive& archive) {
  if (options.group->size() > 1) refuse_archive("torch::load", "RowParallelLinear");
  torch::nn::Module::load(archive);
}

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(std::int64_t vocabulary, std::int64_t width,
                                                       VocabParallelOptions given)
    : options(std::move(given)), vocabulary_(vocabulary) {
  share_ = share_of(options.group, "VocabParallelEmbedding", "rows", vocabulary);
  const torch::nn::Embedding whole(vocabulary, width);
  weight = register_parameter("weight", kept(whole->weight, 0, share_));
  divide(weight, 0, share_, vocabulary_, options.group, "VocabParallelEmbedding");
}

Tensor VocabParallelEmbeddingImpl::forward(const Tensor& ids) {
  if (ids.is_cpu() && ids.numel() > 0) {
    const auto least = ids.min().item<std::int64_t>(), most = ids.max().item<std::int64_t>();
    MANIPLE_REQUIRE(least >= 0 && most < vocabulary_, "VocabParallelEmbedding: id {} is not in a vocabulary of {}",
                    least < 0 ? least : most, vocabulary_);
  }
  const bool first = share_.begin == 0, last = share_.begin + share_.count == vocabulary_;
  Tensor at = ids - share_.begin;
  // The first and the last rank leave ids outside the vocabulary to LibTorch, which refuses them.
  Tensor elsewhere = torch::zeros_like(at, torch::kBool);
  if (!first) elsewhere = elsewhere.logical_or(at < 0);
  if (!last) elsewhere = elsewhere.logical_or(at >= share_.count);
  const Tensor mine = torch::embedding(weight, at.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0);
  if (!options.sequence_parallel) return reduce_from_group(mine, options.group);
  require_divisible(mine, options.group, "VocabParallelEmbedding");
  return reduce_scatter_to_group(mine, 1, options.group);
}

std::optional<TensorShard> VocabParallelEmbeddingImpl::shard_of(const std::string& parameter) const {
  return TensorShard::along(parameter, weight, 0, share_.begin, vocabulary_);
}
void VocabParallelEmbeddingImpl::save(torch::serialize::OutputArchive& archive) const {
  if (options.group->size() > 1) refuse_archive("torch::save", "VocabParallelEmbedding");
  torch::nn::Module::save(archive);
}
void VocabParallelEmbeddingImpl::load(torch::serialize::InputArchive& archive) {
  if (options.group->size() > 1) refuse_archive("torch::load", "VocabParallelEmbedding");
  torch::nn::Module::load(archive);
}

SequenceParallelLayerNormImpl::SequenceParallelLayerNormImpl(std::int64_t width, double eps,
                                                             std::shared_ptr<ProcessGroup> group)
    : LayerNormImpl(torch::nn::LayerNormOptions({width}).eps(eps)), group_(std::move(group)) {}

Tensor SequenceParallelLayerNormImpl::forward(const Tensor& x) {
  return torch::layer_norm(x, options.normalized_shape(), copy_to_group(weight, group_), copy_to_group(bias, group_),
                           options.eps());
}

ParallelAttentionImpl::ParallelAttentionImpl(ParallelBlockOptions given) : options(std::move(given)) {
  MANIPLE_REQUIRE(options.heads >= 1 && options.width >= 1 && options.width % options.heads == 0,
                  "ParallelAttention: a width of {} and {} heads: heads must divide the width", options.width,
                  options.heads);
  if (!options.group) options.group = get_default_group();
  options.group->require_member("ParallelAttention");
  MANIPLE_REQUIRE(options.heads >= options.group->size(),
                  "ParallelAttention: {} heads cannot be divided over {} ranks; each needs one", options.heads,
                  options.group->size());
  const std::int64_t width = options.width, unit = width / options.heads;
  const ColumnParallelOptions column{.unit = unit, .group = options.group};
  query = register_module("query", ColumnParallelLinear(width, width, column));
  key = register_module("key", ColumnParallelLinear(width, width, column));
  value = register_module("value", ColumnParallelLinear(width, width, column));
  proj = register_module("proj", RowParallelLinear(width, width,
                                                   RowParallelOptions{.sequence_parallel = options.sequence_parallel,
                                                                      .unit = unit,
                                                                      .group = options.group}));
}

Tensor ParallelAttentionImpl::forward(const Tensor& x) {
  MANIPLE_REQUIRE(x.dim() == 3 && x.size(2) == options.width,
                  "ParallelAttention: input of [{}]; expected [batch, tokens, {}]", joined(x.sizes()), options.width);
  // The input enters once, for one collective in backward instead of three.
  const Tensor all = entering(x, options.sequence_parallel, options.group);
  const std::int64_t batch = all.size(0), tokens = all.size(1), per_head = options.width / options.heads;
  const auto heads_of = [&](const ColumnParallelLinear& layer) {
    return torch::linear(all, layer->weight, layer->bias).view({batch, tokens, -1, per_head}).transpose(1, 2);
  };
  Tensor scores = heads_of(query).matmul(heads_of(key).transpose(-2, -1)) / std::sqrt(static_cast<double>(per_head));
  if (options.causal) {
    const Tensor future = torch::ones({tokens, tokens}, x.options().dtype(torch::kBool).requires_grad(false)).triu(1);
    scores = scores.masked_fill(future, -INFINITY);
  }
  const Tensor seen = sharded_dropout(scores.softmax(-1), options.dropout, is_training(), options.group);
  return proj(seen.matmul(heads_of(value)).transpose(1, 2).reshape({batch, tokens, -1}));
}

ParallelTransformerBlockImpl::ParallelTransformerBlockImpl(ParallelBlockOptions given) : options(std::move(given)) {
  if (!options.group) options.group = get_default_group();
  if (options.mlp_width == 0) options.mlp_width = 4 * options.width;
  const auto norm_options = torch::nn::LayerNormOptions({options.width}).eps(options.layer_norm_epsilon);
  norm1 = register_module("norm1", torch::nn::LayerNorm(norm_options));
  attention = register_module("attention", ParallelAttention(options));
  norm2 = register_module("norm2", torch::nn::LayerNorm(norm_options));
  fc = register_module("fc", ColumnParallelLinear(options.width, options.mlp_width,
                                                  ColumnParallelOptions{.sequence_parallel = options.sequence_parallel,
                                                                        .group = options.group}));
  proj = register_module("proj", RowParallelLinear(options.mlp_width, options.width,
                                                   RowParallelOptions{.sequence_parallel = options.sequence_parallel,
                                                                      .group = options.group}));
}

Tensor ParallelTransformerBlockImpl::norm(torch::nn::LayerNorm& which, const Tensor& x) const {
  if (!options.sequence_parallel) return which(x);
  return torch::layer_norm(x, {options.width}, copy_to_group(which->weight, options.group),
                           copy_to_group(which->bias, options.group), options.layer_norm_epsilon);
}

Tensor ParallelTransformerBlockImpl::dropped(const Tensor& x) const {
  if (options.sequence_parallel) return sharded_dropout(x, options.dropout, is_training(), options.group);
  return torch::dropout(x, options.dropout, is_training());
}

Tensor ParallelTransformerBlockImpl::forward(const Tensor& x) {
  MANIPLE_REQUIRE(x.dim() == 3 && x.size(2) == options.width,
                  "ParallelTransformerBlock: input of [{}]; expected [batch, tokens, {}]", joined(x.sizes()),
                  options.width);
  const Tensor y = x + dropped(attention(norm(norm1, x)));
  return y + dropped(proj(torch::gelu(fc(norm(norm2, y)))));
}

}  // namespace maniple::nn
