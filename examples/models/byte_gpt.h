// A small GPT over bytes, as a Sequential: the embedding, layers, and the head. The examples train this model in
// several layouts.
//
//   torch::nn::Sequential net = models::byte_gpt({.block = 64, .width = 128, .layers = 3, .heads = 4});
//   // bytes [batch, places] -> scores of the next byte [batch, places, 256]
//   auto scores = net->forward(text);
//   auto loss = models::byte_loss(scores, next);
//
// Weights have the same names as in the tensor-parallel model (maniple::nn::ParallelTransformerBlock and related
// modules) and are drawn in the same order. With the same seed the two models are therefore identical, and checkpoints
// are interchangeable.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>

#include <torch/torch.h>

#include <maniple/train/text.h>

namespace models {

struct ByteGptOptions {
  std::int64_t block = 64;   ///< context length in bytes
  std::int64_t width = 128;  ///< width of an embedding; a multiple of `heads`
  std::int64_t layers = 3;
  std::int64_t heads = 4;
  bool tied = false;  ///< the head and the embedding share one weight tensor
};

/// Embeds bytes and their places.
struct GptEmbeddingImpl : torch::nn::Module {
  explicit GptEmbeddingImpl(const ByteGptOptions& options)
      : bytes(register_module("bytes", torch::nn::Embedding(maniple::ByteText::kVocabulary, options.width))),
        places(register_module("places", torch::nn::Embedding(options.block, options.width))) {
    const torch::NoGradGuard no_grad;
    if (options.tied) bytes->weight.mul_(0.1);  // otherwise too large as the head's weight
  }
  torch::Tensor forward(const torch::Tensor& text) {
    return bytes(text) + places(torch::arange(text.size(1), text.device()));
  }
  torch::nn::Embedding bytes, places;
};
TORCH_MODULE(GptEmbedding);

/// Causal attention: every place attends to itself and to earlier places.
struct GptAttentionImpl : torch::nn::Module {
  GptAttentionImpl(std::int64_t width, std::int64_t heads) : heads_(heads) {
    query = register_module("query", torch::nn::Linear(width, width));
    key = register_module("key", torch::nn::Linear(width, width));
    value = register_module("value", torch::nn::Linear(width, width));
    proj = register_module("proj", torch::nn::Linear(width, width));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto batch = x.size(0), places = x.size(1), per_head = x.size(2) / heads_;
    const auto heads_of = [&](torch::nn::Linear& layer) {
      return layer(x).view({batch, places, heads_, per_head}).transpose(1, 2);
    };
    const auto scores =
        heads_of(query).matmul(heads_of(key).transpose(-2, -1)) / std::sqrt(static_cast<double>(per_head));
    const auto future = torch::ones({places, places}, x.options().dtype(torch::kBool).requires_grad(false)).triu(1);
    const auto seen = scores.masked_fill(future, -INFINITY).softmax(-1).matmul(heads_of(value));
    return proj(seen.transpose(1, 2).reshape(x.sizes()));
  }
  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr}, proj{nullptr};

 private:
  std::int64_t heads_;
};
TORCH_MODULE(GptAttention);

struct GptLayerImpl : torch::nn::Module {
  explicit GptLayerImpl(const ByteGptOptions& options) {
    const auto width = options.width;
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    attention = register_module("attention", GptAttention(width, options.heads));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    fc = register_module("fc", torch::nn::Linear(width, 4 * width));
    proj = register_module("proj", torch::nn::Linear(4 * width, width));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = x + attention(norm1(x));
    return x + proj(torch::gelu(fc(norm2(x))));
  }
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  GptAttention attention{nullptr};
  torch::nn::Linear fc{nullptr}, proj{nullptr};
};
TORCH_MODULE(GptLayer);

/// Computes a score for each possible next byte.
struct GptHeadImpl : torch::nn::Module {
  /// `tied`: the shared weight; undefined: the head gets its own.
  explicit GptHeadImpl(std::int64_t width, torch::Tensor tied = {}) {
    if (!tied.defined()) {
      tied = torch::nn::Linear(torch::nn::LinearOptions(width, maniple::ByteText::kVocabulary).bias(false))->weight;
    }
    weight = register_parameter("weight", tied);
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(norm(x), weight); }
  torch::Tensor weight;
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(GptHead);

inline torch::nn::Sequential byte_gpt(const ByteGptOptions& options) {
  if (options.heads < 1 || options.width % options.heads != 0)
    throw std::invalid_argument("--width must be a multiple of --heads");
  torch::nn::Sequential net;
  const GptEmbedding embedding(options);
  net->push_back(embedding);
  for (std::int64_t i = 0; i < options.layers; ++i) net->push_back(GptLayer(options));
  net->push_back(GptHead(options.width, options.tied ? embedding->bytes->weight : torch::Tensor()));
  return net;
}

/// Approximate bytes of float32 activations that layers [begin, end) of the Sequential keep between forward and
/// backward, for a batch of `rows`. For each place, a layer keeps 4 times the width for norms and residuals. Attention
/// and MLP keep another 12 times the width and one score per place and head; `ranks` divide this part.
inline std::uint64_t activation_bytes(const ByteGptOptions& options, std::int64_t begin, std::int64_t end,
                                      std::int64_t rows, std::int64_t ranks = 1) {
  const std::int64_t places = rows * options.block;
  const std::int64_t inside = 12 * options.width + options.heads * options.block;
  std::int64_t numbers = 0;
  for (std::int64_t layer = begin; layer < end; ++layer) {
    if (layer == 0) {
      numbers += 2 * places;  // the text, 8 bytes per place
    } else if (layer <= options.layers) {
      numbers += places * (4 * options.width + inside / ranks);
    } else {
      numbers += places * (2 * options.width + maniple::ByteText::kVocabulary / ranks);
    }
  }
  return static_cast<std::uint64_t>(4 * numbers);
}

/// The mean loss over all places of a batch.
inline torch::Tensor byte_loss(const torch::Tensor& scores, const torch::Tensor& next) {
  return torch::cross_entropy_loss(scores.flatten(0, 1), next.flatten());
}

}  // namespace models
