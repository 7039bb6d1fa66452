// GPT-2, with the names and layouts of Hugging Face's GPT2LMHeadModel, so that its weights load without conversion.
//
//   models::Gpt2 net(models::gpt2_small());
//   // the Hub's openai-community/gpt2
//   maniple::load_weights(*net, "gpt2/", {.rename = models::kGpt2Renames});
//   for (const auto id : net->generate({464, 2068, 7586}, {.length = 20})) ...
//
// The model works on token ids; the program needs its own tokenizer to convert between text and ids.
//
// Files written by GPT2LMHeadModel.save_pretrained use the same names ("transformer.wte.weight"). The Hub's files come
// from GPT2Model and lack the prefix "transformer.". Both may contain causal masks ("attn.bias"), which are computed
// here. kGpt2Renames adds the prefix and drops the masks. "lm_head.weight" is the embedding "transformer.wte.weight"
// under a second name (tied), so it is dropped, too.
//
// Linear layers are Hugging Face's Conv1D: y = x W + b with W of shape [in, out], the transpose of torch::nn::Linear's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

namespace models {

struct Gpt2Options {
  std::int64_t vocabulary = 50257;
  std::int64_t positions = 1024;  ///< maximum context length in tokens
  std::int64_t width = 768;       ///< width of an embedding; a multiple of `heads`
  std::int64_t layers = 12;
  std::int64_t heads = 12;
  double dropout = 0.1;
  double layer_norm_epsilon = 1e-5;
};
inline Gpt2Options gpt2_small() { return {}; }
inline Gpt2Options gpt2_medium() { return {.width = 1024, .layers = 24, .heads = 16}; }
inline Gpt2Options gpt2_large() { return {.width = 1280, .layers = 36, .heads = 20}; }
inline Gpt2Options gpt2_xl() { return {.width = 1600, .layers = 48, .heads = 25}; }

/// For LoadWeightsOptions::rename: maps names in the Hub's files to the names here; names that already match stay.
/// Masks and the embedding's second name map to the empty name, which drops them.
inline const std::vector<std::pair<std::string, std::string>> kGpt2Renames = {
    {R"(^(wte|wpe|ln_f|h\.[0-9]+)\.)", R"(transformer.\1.)"},
    {R"(^transformer\.h\.[0-9]+\.attn\.(masked_)?bias$)", ""},
    {R"(^lm_head\.weight$)", ""}};

/// Keys and values of the tokens so far, for each layer, so that generate() does not recompute them.
struct Gpt2Cache {
  struct Layer {
    torch::Tensor key, value;  ///< [batch, heads, tokens, width / heads]
  };
  std::vector<Layer> layers;
  std::int64_t tokens = 0;
};

struct GenerateOptions {
  std::size_t length = 50;        ///< maximum number of tokens to add
  std::int64_t top_k = 1;         ///< sample from the `top_k` most probable tokens; 1: greedy; 0: from all tokens
  double temperature = 1;         ///< above 1: more varied; below 1: less varied
  std::uint64_t seed = 0;         ///< of a separate random generator
  std::int64_t end_of_text = -1;  ///< stop at this token (50256 in GPT-2's vocabulary); -1: stop only at `length`
};

namespace gpt2 {

struct Conv1dImpl : torch::nn::Module {
  Conv1dImpl(std::int64_t in, std::int64_t out)
      : weight(register_parameter("weight", torch::randn({in, out}) * 0.02)),
        bias(register_parameter("bias", torch::zeros({out}))) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::matmul(x, weight) + bias; }
  torch::Tensor weight, bias;
};
TORCH_MODULE(Conv1d);

struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const Gpt2Options& o)
      : heads(o.heads),
        c_attn(register_module("c_attn", Conv1d(o.width, 3 * o.width))),
        c_proj(register_module("c_proj", Conv1d(o.width, o.width))),
        attn_dropout(register_module("attn_dropout", torch::nn::Dropout(o.dropout))),
        resid_dropout(register_module("resid_dropout", torch::nn::Dropout(o.dropout))) {}

  torch::Tensor forward(const torch::Tensor& x, Gpt2Cache::Layer* past = nullptr) {
    const auto batch = x.size(0), tokens = x.size(1), width = x.size(2);
    const auto parts = c_attn(x).view({batch, tokens, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    auto key = parts[1], value = parts[2];
    if (past != nullptr) {
      if (past->key.defined()) {
        key = torch::cat({past->key, key}, 2);
        value = torch::cat({past->value, value}, 2);
      }
      past->key = key;
      past->value = value;
    }
    const auto all = key.size(2);
    auto scores = parts[0].matmul(key.transpose(-2, -1)) / std::sqrt(static_cast<double>(width / heads));
    const auto future = torch::ones({tokens, all}, x.options().dtype(torch::kBool)).triu(all - tokens + 1);
    scores = scores.masked_fill(future, -INFINITY).softmax(-1);
    const auto seen = attn_dropout(scores).matmul(value).transpose(1, 2).reshape({batch, tokens, width});
    return resid_dropout(c_proj(seen));
  }
  std::int64_t heads;
  Conv1d c_attn, c_proj;
  torch::nn::Dropout attn_dropout, resid_dropout;
};
TORCH_MODULE(Attention);

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(const Gpt2Options& o)
      : c_fc(register_module("c_fc", Conv1d(o.width, 4 * o.width))),
        c_proj(register_module("c_proj", Conv1d(4 * o.width, o.width))),
        dropout(register_module("dropout", torch::nn::Dropout(o.dropout))) {}
  torch::Tensor forward(const torch::Tensor& x) { return dropout(c_proj(torch::gelu(c_fc(x), "tanh"))); }
  Conv1d c_fc, c_proj;
  torch::nn::Dropout dropout;
};
TORCH_MODULE(Mlp);

inline torch::nn::LayerNorm layer_norm(const Gpt2Options& o) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({o.width}).eps(o.layer_norm_epsilon));
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const Gpt2Options& o)
      : ln_1(register_module("ln_1", layer_norm(o))),
        attn(register_module("attn", Attention(o))),
        ln_2(register_module("ln_2", layer_norm(o))),
        mlp(register_module("mlp", Mlp(o))) {}
  torch::Tensor forward(torch::Tensor x, Gpt2Cache::Layer* past = nullptr) {
    x = x + attn->forward(ln_1(x), past);
    return x + mlp(ln_2(x));
  }
  torch::nn::LayerNorm ln_1;
  Attention attn;
  torch::nn::LayerNorm ln_2;
  Mlp mlp;
};
TORCH_MODULE(Block);

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const Gpt2Options& o)
      : wte(register_module("wte", torch::nn::Embedding(o.vocabulary, o.width))),
        wpe(register_module("wpe", torch::nn::Embedding(o.positions, o.width))),
        drop(register_module("drop", torch::nn::Dropout(o.dropout))),
        h(register_module("h", torch::nn::ModuleList())),
        ln_f(register_module("ln_f", layer_norm(o))) {
    for (std::int64_t i = 0; i < o.layers; ++i) h->push_back(Block(o));
    const torch::NoGradGuard no_grad;
    wte->weight.normal_(0, 0.02);
    wpe->weight.normal_(0, 0.02);
    // Scale the weights that write to the residual stream, which has 2 x layers summands.
    for (const auto& item : named_parameters())
      if (item.key().find("c_proj.weight") != std::string::npos)
        item.value().div_(std::sqrt(2.0 * static_cast<double>(o.layers)));
  }
  torch::Tensor forward(const torch::Tensor& ids, Gpt2Cache* cache = nullptr) {
    const std::int64_t before = cache != nullptr ? cache->tokens : 0;
    if (cache != nullptr) {
      cache->layers.resize(h->size());
      cache->tokens += ids.size(1);
    }
    auto x = drop(wte(ids) + wpe(torch::arange(before, before + ids.size(1), ids.options())));
    for (std::size_t i = 0; i < h->size(); ++i)
      x = h->ptr<BlockImpl>(i)->forward(x, cache != nullptr ? &cache->layers[i] : nullptr);
    return ln_f(x);
  }
  torch::nn::Embedding wte, wpe;
  torch::nn::Dropout drop;
  torch::nn::ModuleList h;
  torch::nn::LayerNorm ln_f;
};
TORCH_MODULE(Transformer);

}  // namespace gpt2

struct Gpt2Impl : torch::nn::Module {
  explicit Gpt2Impl(const Gpt2Options& o = {})
      : options(o), transformer(register_module("transformer", gpt2::Transformer(o))) {
    if (o.heads < 1 || o.width % o.heads != 0)
      throw std::invalid_argument("Gpt2: a width of " + std::to_string(o.width) + " is not a multiple of " +
                                  std::to_string(o.heads) + " heads");
  }

  /// Maps int64 ids [batch, tokens] to logits [batch, tokens, vocabulary] of the token after each one. At most
  /// options.positions tokens, including the cached ones.
  torch::Tensor forward(const torch::Tensor& ids, Gpt2Cache* cache = nullptr) {
    const std::int64_t tokens = ids.size(1) + (cache != nullptr ? cache->tokens : 0);
    if (tokens > options.positions)
      throw std::invalid_argument("Gpt2: " + std::to_string(tokens) + " tokens; it sees at most " +
                                  std::to_string(options.positions));
    return torch::linear(transformer->forward(ids, cache), transformer->wte->weight);
  }

  /// Returns `ids` followed by the generated ids. Dropout is off meanwhile.
  std::vector<std::int64_t> generate(std::vector<std::int64_t> ids, const GenerateOptions& how = {}) {
    if (ids.empty()) throw std::invalid_argument("Gpt2: generate() needs at least one token to begin with");
    const torch::NoGradGuard no_grad;
    const bool was_training = is_training();
    eval();
    const auto generator = at::detail::createCPUGenerator(how.seed);
    Gpt2Cache cache;
    for (std::size_t i = 0; i < how.length; ++i) {
      // Evaluate the whole text first, then only the latest token. Once the text exceeds the context, evaluate its
      // latest part again for every token.
      const auto size = static_cast<std::int64_t>(ids.size());
      if (size > options.positions) cache = {};
      const std::int64_t begin = cache.tokens > 0 ? size - 1 : std::max<std::int64_t>(0, size - options.positions);
      const auto input = torch::tensor(std::vector<std::int64_t>(ids.begin() + begin, ids.end())).unsqueeze(0);
      const auto logits = forward(input.to(transformer->wte->weight.device()), &cache)[0][-1];
      ids.push_back(choose(logits.to(torch::kCPU, torch::kFloat32), how, generator));
      if (ids.back() == how.end_of_text) break;
    }
    train(was_training);
    return ids;
  }

  Gpt2Options options;
  gpt2::Transformer transformer;

 private:
  static std::int64_t choose(torch::Tensor logits, const GenerateOptions& how, const at::Generator& generator) {
    if (how.top_k == 1) return logits.argmax().item<std::int64_t>();
    logits = logits / how.temperature;
    if (how.top_k > 0) {
      const auto least = std::get<0>(logits.topk(std::min(how.top_k, logits.size(0)))).min();
      logits = logits.masked_fill(logits < least, -INFINITY);
    }
    return logits.softmax(0).multinomial(1, false, generator).item<std::int64_t>();
  }
};
TORCH_MODULE(Gpt2);

}  // namespace models
