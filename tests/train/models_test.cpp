// The models of examples/models against straightforward computations, from weights under the names that published files
// have.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "comm/base/files.h"
#include "comm/base/format.h"
#include "examples/models/gpt2.h"
#include "examples/models/resnet.h"
#include "harness/temporary_directory.h"
#include "train/models.h"
#include <maniple/train/weights.h>

namespace maniple::harness::models_test {
namespace {

using Weights = std::map<std::string, torch::Tensor>;
using Sizes = std::vector<std::int64_t>;

/// A file in the making: every tensor is different, and the same in every run.
class WeightsFile {
 public:
  void add(const std::string& name, const Sizes& sizes, double mean = 0, double scale = 0.3) {
    weights[name] = testing_models::numbers(sizes, ++seed_).to(torch::kFloat64) * scale + mean;
  }
  Weights weights;

 private:
  int seed_ = 0;
};

/// Through files, as published weights come: one, or shards with their index. Everything in the module is loaded, and
/// nothing is left over but what is renamed to nothing.
void load(torch::nn::Module& module, const Weights& weights,
          const std::vector<std::pair<std::string, std::string>>& renames = {}, std::size_t left_out = 0) {
  module.to(torch::kFloat64);
  for (auto& buffer : module.named_buffers()) {  // whole numbers are to stay that
    if (buffer.key().ends_with("num_batches_tracked")) buffer.value().set_data(buffer.value().to(torch::kInt64));
  }
  std::uint64_t bytes = 0;
  for (const auto& [name, tensor] : weights) bytes += tensor.nbytes();
  for (const std::uint64_t shard_bytes : {std::uint64_t{0}, bytes / 3}) {
    const TemporaryDirectory folder;
    std::vector<std::pair<std::string, torch::Tensor>> named(weights.begin(), weights.end());
    save_weights(named, folder.path(), {.max_shard_bytes = shard_bytes});
    EXPECT_EQ(names_in(folder.path()).size() > 2, shard_bytes > 0);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : module.parameters()) parameter.fill_(-3);
    }
    const WeightsReport report = load_weights(module, folder.path(), {.rename = renames});
    EXPECT_TRUE(report.complete()) << report.text();
    EXPECT_EQ(report.loaded.size(), weights.size() - left_out);
    EXPECT_EQ(report.ignored.size(), left_out);
  }
}

// ---- GPT-2 ----------------------------------------------------------------------------------------------------------

constexpr std::int64_t kVocabulary = 11, kPositions = 7, kWidth = 6, kLayers = 2, kHeads = 3;

models::Gpt2Options small_gpt2() {
  return {.vocabulary = kVocabulary, .positions = kPositions, .width = kWidth, .layers = kLayers, .heads = kHeads};
}

/// As GPT2LMHeadModel ("transformer.") or GPT2Model (no prefix) writes it.
Weights gpt2_file(const std::string& prefix) {
  WeightsFile file;
  file.add(prefix + "wte.weight", {kVocabulary, kWidth});
  file.add(prefix + "wpe.weight", {kPositions, kWidth});
  for (std::int64_t i = 0; i < kLayers; ++i) {
    const std::string h = prefix + "h." + std::to_string(i) + ".";
    for (const std::string norm : {"ln_1", "ln_2"}) {
      file.add(h + norm + ".weight", {kWidth}, 1);
      file.add(h + norm + ".bias", {kWidth});
    }
    const std::map<std::string, Sizes> layers = {{"attn.c_attn", {kWidth, 3 * kWidth}},
                                                 {"attn.c_proj", {kWidth, kWidth}},
                                                 {"mlp.c_fc", {kWidth, 4 * kWidth}},
                                                 {"mlp.c_proj", {4 * kWidth, kWidth}}};
    for (const auto& [name, sizes] : layers) {
      file.add(h + name + ".weight", sizes);
      file.add(h + name + ".bias", {sizes[1]});
    }
  }
  file.add(prefix + "ln_f.weight", {kWidth}, 1);
  file.add(prefix + "ln_f.bias", {kWidth});
  return file.weights;
}

torch::Tensor norm_by_hand(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias) {
  const auto centered = x - x.mean();
  return centered / torch::sqrt(centered.pow(2).mean() + 1e-5) * weight + bias;
}

/// Logits after each token of one text: vectors one by one, heads one by one.
torch::Tensor gpt2_by_hand(const Weights& w, const std::vector<std::int64_t>& ids, const std::string& prefix) {
  const auto get = [&](const std::string& name) { return w.at(prefix + name); };
  const std::size_t tokens = ids.size();
  std::vector<torch::Tensor> x;
  for (std::size_t t = 0; t < tokens; ++t)
    x.push_back(get("wte.weight")[ids[t]] + get("wpe.weight")[static_cast<std::int64_t>(t)]);
  const std::int64_t size = kWidth / kHeads;
  for (std::int64_t i = 0; i < kLayers; ++i) {
    const std::string h = "h." + std::to_string(i) + ".";
    const auto linear = [&](const std::string& name, const torch::Tensor& v) {
      return get(h + name + ".weight").t().mv(v) + get(h + name + ".bias");
    };
    std::vector<torch::Tensor> qkv;
    for (const auto& v : x)
      qkv.push_back(linear("attn.c_attn", norm_by_hand(v, get(h + "ln_1.weight"), get(h + "ln_1.bias"))));
    for (std::size_t t = 0; t < tokens; ++t) {
      std::vector<torch::Tensor> heads;
      for (std::int64_t head = 0; head < kHeads; ++head) {
        const auto part = [&](std::size_t token, std::int64_t which) {
          return qkv[token].narrow(0, which * kWidth + head * size, size);
        };
        double sum = 0;
        auto seen = torch::zeros({size}, torch::kFloat64);
        for (std::size_t s = 0; s <= t; ++s) {
          const double weight = std::exp(part(t, 0).dot(part(s, 1)).item<double>() / std::sqrt(double(size)));
          sum += weight;
          seen += part(s, 2) * weight;
        }
        heads.push_back(seen / sum);
      }
      x[t] = x[t] + linear("attn.c_proj", torch::cat(heads));
    }
    for (auto& v : x) {
      const auto u = linear("mlp.c_fc", norm_by_hand(v, get(h + "ln_2.weight"), get(h + "ln_2.bias")));
      const auto gelu = 0.5 * u * (1 + torch::tanh(std::sqrt(2 / M_PI) * (u + 0.044715 * u.pow(3))));
      v = v + linear("mlp.c_proj", gelu);
    }
  }
  std::vector<torch::Tensor> logits;
  for (const auto& v : x) logits.push_back(get("wte.weight").mv(norm_by_hand(v, get("ln_f.weight"), get("ln_f.bias"))));
  return torch::stack(logits);
}

TEST(Gpt2, LogitsFromWeightsInTheirPublishedNames) {
  const std::vector<std::int64_t> ids = {3, 1, 4, 1, 5, 9, 2};
  for (const std::string prefix : {"transformer.", ""}) {
    auto weights = gpt2_file(prefix);
    const auto expected = gpt2_by_hand(weights, ids, prefix);
    // What files of the Hub hold besides.
    weights[prefix + "h.0.attn.bias"] = torch::ones({1, 1, kPositions, kPositions}, torch::kBool).tril();
    weights[prefix + "h.1.attn.masked_bias"] = torch::tensor(-1e4);
    weights["lm_head.weight"] = weights.at(prefix + "wte.weight").clone();  // tied ones are saved once
    models::Gpt2 net(small_gpt2());
    load(*net, weights, models::kGpt2Renames, 3);
    net->eval();
    const torch::NoGradGuard no_grad;
    const auto batch = torch::tensor(ids).repeat({2, 1});
    const auto logits = net->forward(batch);
    ASSERT_EQ(logits.sizes(), (Sizes{2, 7, kVocabulary}));
    EXPECT_TRUE(torch::allclose(logits[0], expected, 1e-9, 1e-9)) << prefix << (logits[0] - expected).abs().max();
    EXPECT_TRUE(torch::allclose(logits[1], expected, 1e-9, 1e-9));
    // In two parts, with what was computed for the first.
    models::Gpt2Cache cache;
    net->forward(batch.slice(1, 0, 3), &cache);
    EXPECT_TRUE(torch::allclose(net->forward(batch.slice(1, 3), &cache)[0], expected.slice(0, 3), 1e-9, 1e-9));
    EXPECT_THROW(net->forward(batch, &cache), std::invalid_argument) << "14 tokens";
  }
}

// What is saved has the names and shapes of GPT2LMHeadModel's files; for a model of torch::nn::Linear, Conv1D is
// transposed.
TEST(Gpt2, IsSavedInThePublishedNames) {
  const auto weights = gpt2_file("transformer.");
  models::Gpt2 net(small_gpt2());
  load(*net, weights);
  const TemporaryDirectory folder;
  save_weights(*net, folder.path(), {.max_shard_bytes = 3000});
  const auto saved = read_weights(folder.path());
  ASSERT_EQ(saved.size(), weights.size());
  for (const auto& [name, tensor] : weights) {
    ASSERT_TRUE(saved.contains(name)) << name;
    EXPECT_TRUE(saved[name].equal(tensor)) << name;
  }
  torch::nn::Linear in(kWidth, 3 * kWidth);
  in->to(torch::kFloat64);
  const std::string layer = "transformer.h.1.attn.c_attn.";
  load_weights({{layer + "weight", in->weight}, {layer + "bias", in->bias}}, folder.path(),
               {.strict = false, .transpose = {"c_(attn|proj|fc)\\.weight$"}});
  const auto x = testing_models::numbers({3, kWidth}).to(torch::kFloat64);
  EXPECT_TRUE(
      torch::allclose(in(x), x.matmul(weights.at(layer + "weight")) + weights.at(layer + "bias"), 1e-12, 1e-12));
}

TEST(Gpt2, HasAsManyParametersAsThePublishedOne) {
  // 124439808 of GPT-2 small: 50257 and 1024 embeddings, 12 layers, a norm.
  const models::Gpt2 net(models::Gpt2Options{.vocabulary = 5, .positions = 3, .layers = 1});
  std::int64_t count = 0;
  for (const auto& parameter : net->parameters()) count += parameter.numel();
  const std::int64_t layer = count - 8 * 768 - 2 * 768;
  EXPECT_EQ((50257 + 1024) * 768 + 12 * layer + 2 * 768, 124439808);
}

TEST(Gpt2, Generates) {
  models::Gpt2 net(small_gpt2());
  load(*net, gpt2_file("transformer."));
  net->train();
  const torch::NoGradGuard no_grad;
  const auto next_logits = [&](const std::vector<std::int64_t>& ids) {
    const std::size_t begin = ids.size() - std::min<std::size_t>(ids.size(), kPositions);
    net->eval();
    const auto input =
        torch::tensor(std::vector<std::int64_t>(ids.begin() + static_cast<std::ptrdiff_t>(begin), ids.end()));
    const auto logits = net->forward(input.unsqueeze(0))[0][-1];
    net->train();
    return logits;
  };
  // Greedy, past what it sees at once.
  std::vector<std::int64_t> expected = {2, 7};
  while (expected.size() < 12) expected.push_back(next_logits(expected).argmax().item<std::int64_t>());
  EXPECT_EQ(net->generate({2, 7}, {.length = 10}), expected);
  EXPECT_TRUE(net->is_training()) << "as before";
  const auto until = net->generate({2, 7}, {.length = 10, .end_of_text = expected[4]});
  EXPECT_EQ(until.back(), expected[4]);
  EXPECT_LE(until.size(), 5U);
  // Drawn: by the seed alone, and never another token than one of the best.
  std::set<std::vector<std::int64_t>> texts;
  for (const std::uint64_t seed : {1, 2, 3, 4, 5}) {
    const models::GenerateOptions how = {.length = 8, .top_k = 3, .temperature = 2, .seed = seed};
    torch::manual_seed(seed + 100);
    const auto ids = net->generate({2, 7}, how);
    torch::manual_seed(7);
    EXPECT_EQ(net->generate({2, 7}, how), ids);
    texts.insert(ids);
    for (std::size_t i = 2; i < ids.size(); ++i) {
      const auto best = std::get<1>(next_logits({ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(i)}).topk(3));
      EXPECT_TRUE(best.eq(ids[i]).any().item<bool>()) << i;
    }
  }
  EXPECT_GT(texts.size(), 1U);
  EXPECT_THROW(net->generate({}), std::invalid_argument);
}

// ---- ResNet ---------------------------------------------------------------------------------------------------------

/// Names of torchvision and of Hugging Face, side by side.
struct Naming {
  std::string stem_convolution, stem_norm, head;
  std::string block(std::size_t stage, std::int64_t i) const {
    return hugging_face ? format_text("resnet.encoder.stages.{}.layers.{}.", stage, i)
                        : format_text("layer{}.{}.", stage + 1, i);
  }
  std::string convolution(int i) const {
    return hugging_face ? format_text("layer.{}.convolution", i) : format_text("conv{}", i + 1);
  }
  std::string norm(int i) const {
    return hugging_face ? format_text("layer.{}.normalization", i) : format_text("bn{}", i + 1);
  }
  std::string shortcut_convolution() const { return hugging_face ? "shortcut.convolution" : "downsample.0"; }
  std::string shortcut_norm() const { return hugging_face ? "shortcut.normalization" : "downsample.1"; }
  bool hugging_face = false;
};
Naming torchvision() { return {"conv1", "bn1", "fc"}; }
Naming hugging_face() {
  return {"resnet.embedder.embedder.convolution", "resnet.embedder.embedder.normalization", "classifier.1", true};
}

/// A ResNet while it is written down: computes with each tensor as it is made.
class ResNetByHand {
 public:
  ResNetByHand(const models::ResNetOptions& options, Naming naming, torch::Tensor x)
      : n_(std::move(naming)), x_(std::move(x)) {
    x_ = torch::relu(norm(n_.stem_norm, convolution(n_.stem_convolution, x_, options.width, 7, 2)));
    x_ = torch::max_pool2d(x_, 3, 2, 1);
    for (std::size_t stage = 0; stage < 4; ++stage) {
      for (std::int64_t i = 0; i < options.blocks[stage]; ++i)
        block(n_.block(stage, i), options.width << stage, stage > 0 && i == 0 ? 2 : 1, options.bottleneck);
    }
    x_ = x_.mean({2, 3});
    file_.add(n_.head + ".weight", {options.classes, x_.size(1)});
    file_.add(n_.head + ".bias", {options.classes});
    logits = x_.matmul(file_.weights.at(n_.head + ".weight").t()) + file_.weights.at(n_.head + ".bias");
  }
  const Weights& weights() const { return file_.weights; }
  torch::Tensor logits;

 private:
  void block(const std::string& name, std::int64_t width, std::int64_t stride, bool bottleneck) {
    const auto in = x_;
    auto y = x_;
    const int convolutions = bottleneck ? 3 : 2;
    for (int i = 0; i < convolutions; ++i) {
      const bool is_last = i + 1 == convolutions;
      const std::int64_t out = bottleneck && is_last ? 4 * width : width;
      const bool strided = bottleneck ? i == 1 : i == 0;
      y = convolution(name + n_.convolution(i), y, out, bottleneck && i != 1 ? 1 : 3, strided ? stride : 1);
      y = norm(name + n_.norm(i), y);
      if (!is_last) y = torch::relu(y);
    }
    auto kept = in;
    if (in.sizes() != y.sizes())
      kept = norm(name + n_.shortcut_norm(), convolution(name + n_.shortcut_convolution(), in, y.size(1), 1, stride));
    x_ = torch::relu(y + kept);
  }
  torch::Tensor convolution(const std::string& name, const torch::Tensor& x, std::int64_t out, std::int64_t size,
                            std::int64_t stride) {
    file_.add(name + ".weight", {out, x.size(1), size, size});
    return torch::conv2d(x, file_.weights.at(name + ".weight"), {}, stride, size / 2);
  }
  torch::Tensor norm(const std::string& name, const torch::Tensor& x) {
    file_.add(name + ".weight", {x.size(1)}, 0.7);
    file_.add(name + ".bias", {x.size(1)});
    file_.add(name + ".running_mean", {x.size(1)});
    file_.add(name + ".running_var", {x.size(1)}, 1);
    file_.weights[name + ".num_batches_tracked"] = torch::tensor(std::int64_t{17});
    const auto get = [&](const char* part) { return file_.weights.at(name + part).view({1, -1, 1, 1}); };
    return (x - get(".running_mean")) / torch::sqrt(get(".running_var") + 1e-5) * get(".weight") + get(".bias");
  }

  Naming n_;
  torch::Tensor x_;
  WeightsFile file_;
};

TEST(ResNet, LogitsFromWeightsInTheirPublishedNames) {
  const torch::NoGradGuard no_grad;
  const auto pictures = testing_models::numbers({2, 3, 40, 40}).to(torch::kFloat64);
  for (models::ResNetOptions options : {models::resnet18(), models::resnet34(), models::resnet50()}) {
    options.width = 4;
    options.classes = 5;
    for (const bool of_hugging_face : {false, true}) {
      const ResNetByHand expected(options, of_hugging_face ? hugging_face() : torchvision(), pictures);
      models::ResNet net(options);
      if (of_hugging_face) {
        load(*net, expected.weights(), models::kResNetRenames);
      } else {
        load(*net, expected.weights());
      }
      net->eval();
      const auto logits = net->forward(pictures);
      EXPECT_EQ(logits.sizes(), (Sizes{2, 5}));
      EXPECT_TRUE(torch::allclose(logits, expected.logits, 1e-9, 1e-9)) << (logits - expected.logits).abs().max();
      net->replace_head(3);
      EXPECT_EQ(net->forward(pictures).sizes(), (Sizes{2, 3}));
    }
  }
}

TEST(ResNet, HasAsManyParametersAsThePublishedOnes) {
  const std::vector<std::pair<models::ResNetOptions, std::int64_t>> known = {
      {models::resnet18(), 11689512}, {models::resnet34(), 21797672}, {models::resnet50(), 25557032}};
  for (const auto& [options, expected] : known) {
    // Computed from one of a quarter of the width: all convolutions have a sixteenth of the parameters, but the first
    // of a quarter.
    models::ResNetOptions narrow = options;
    narrow.width = 16;
    const models::ResNet net(narrow);
    std::int64_t count = 0;
    for (const auto& item : net->named_parameters()) {
      const auto& parameter = item.value();
      const bool inside = parameter.dim() == 4 && item.key() != "conv1.weight";
      const bool of_classes = item.key() == "fc.bias";
      count += parameter.numel() * (of_classes ? 1 : inside ? 16 : 4);
    }
    EXPECT_EQ(count, expected);
  }
}

}  // namespace
}  // namespace maniple::harness::models_test
