// ResNet 18, 34 and 50, with torchvision's names and layouts, so that its weights load without conversion.
//
//   models::ResNet net(models::resnet50());
//   maniple::load_weights(*net, "resnet50.pth");                                         // of torchvision
//   // the Hub's microsoft/resnet-50
//   maniple::load_weights(*net, "resnet-50/", {.rename = models::kResNetRenames});
//   net->eval();
//   auto classes = net->forward(pictures);                             // [batch, 3, 224, 224] -> [batch, 1000]
//
// Pictures are RGB in 0 .. 1, normalised with ImageNet's mean {0.485, 0.456, 0.406} and standard deviation {0.229,
// 0.224, 0.225}. For another number of classes, load the weights first, then call `replace_head(10)`.
//
// In ResNet-50's blocks the 3 x 3 convolution has the stride ("version 1.5"), as in torchvision and
// microsoft/resnet-50.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

namespace models {

struct ResNetOptions {
  std::array<std::int64_t, 4> blocks = {2, 2, 2, 2};  ///< blocks in each of the four stages
  bool bottleneck = false;  ///< blocks of three convolutions (1 x 1, 3 x 3, 1 x 1) rather than two of 3 x 3
  std::int64_t classes = 1000;
  std::int64_t channels = 3;  ///< channels of a picture
  std::int64_t width = 64;    ///< channels of the first stage; each further stage doubles them
};
inline ResNetOptions resnet18() { return {}; }
inline ResNetOptions resnet34() { return {.blocks = {3, 4, 6, 3}}; }
inline ResNetOptions resnet50() { return {.blocks = {3, 4, 6, 3}, .bottleneck = true}; }

/// For LoadWeightsOptions::rename: maps the names of Hugging Face's ResNetForImageClassification.
inline const std::vector<std::pair<std::string, std::string>> kResNetRenames = {
    {R"(^resnet\.embedder\.embedder\.convolution\.)", "conv1."},
    {R"(^resnet\.embedder\.embedder\.normalization\.)", "bn1."},
    {R"(^resnet\.encoder\.stages\.0\.layers\.)", "layer1."},
    {R"(^resnet\.encoder\.stages\.1\.layers\.)", "layer2."},
    {R"(^resnet\.encoder\.stages\.2\.layers\.)", "layer3."},
    {R"(^resnet\.encoder\.stages\.3\.layers\.)", "layer4."},
    {R"(\.shortcut\.convolution\.)", ".downsample.0."},
    {R"(\.shortcut\.normalization\.)", ".downsample.1."},
    {R"(\.layer\.0\.convolution\.)", ".conv1."},
    {R"(\.layer\.0\.normalization\.)", ".bn1."},
    {R"(\.layer\.1\.convolution\.)", ".conv2."},
    {R"(\.layer\.1\.normalization\.)", ".bn2."},
    {R"(\.layer\.2\.convolution\.)", ".conv3."},
    {R"(\.layer\.2\.normalization\.)", ".bn3."},
    {R"(^classifier\.1\.)", "fc."}};

namespace resnet {

inline torch::nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t size, std::int64_t stride) {
  torch::nn::Conv2d made(torch::nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
  torch::nn::init::kaiming_normal_(made->weight, 0, torch::kFanOut, torch::kReLU);
  return made;
}

/// Two or three convolutions, added to the input (through a 1 x 1 convolution if the shape changes).
struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t in, std::int64_t width, std::int64_t stride, bool bottleneck)
      : conv1(register_module("conv1", convolution(in, width, bottleneck ? 1 : 3, bottleneck ? 1 : stride))),
        bn1(register_module("bn1", torch::nn::BatchNorm2d(width))),
        conv2(register_module("conv2", convolution(width, width, 3, bottleneck ? stride : 1))),
        bn2(register_module("bn2", torch::nn::BatchNorm2d(width))) {
    const std::int64_t out = bottleneck ? 4 * width : width;
    if (bottleneck) {
      conv3 = register_module("conv3", convolution(width, out, 1, 1));
      bn3 = register_module("bn3", torch::nn::BatchNorm2d(out));
    }
    if (stride != 1 || in != out)
      downsample = register_module("downsample",
                                   torch::nn::Sequential(convolution(in, out, 1, stride), torch::nn::BatchNorm2d(out)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = bn2(conv2(torch::relu(bn1(conv1(x)))));
    if (conv3) y = bn3(conv3(torch::relu(y)));
    return torch::relu(y + (downsample ? downsample->forward(x) : x));
  }
  torch::nn::Conv2d conv1;
  torch::nn::BatchNorm2d bn1;
  torch::nn::Conv2d conv2;
  torch::nn::BatchNorm2d bn2;
  torch::nn::Conv2d conv3{nullptr};
  torch::nn::BatchNorm2d bn3{nullptr};
  torch::nn::Sequential downsample{nullptr};
};
TORCH_MODULE(Block);

}  // namespace resnet

struct ResNetImpl : torch::nn::Module {
  explicit ResNetImpl(const ResNetOptions& options = {})
      : conv1(register_module("conv1", resnet::convolution(options.channels, options.width, 7, 2))),
        bn1(register_module("bn1", torch::nn::BatchNorm2d(options.width))) {
    std::int64_t in = options.width;
    for (std::size_t stage = 0; stage < layers.size(); ++stage) {
      const std::int64_t width = options.width << stage;
      torch::nn::Sequential blocks;
      for (std::int64_t i = 0; i < options.blocks[stage]; ++i) {
        blocks->push_back(resnet::Block(in, width, stage > 0 && i == 0 ? 2 : 1, options.bottleneck));
        in = options.bottleneck ? 4 * width : width;
      }
      layers[stage] = register_module("layer" + std::to_string(stage + 1), blocks);
    }
    fc = register_module("fc", torch::nn::Linear(in, options.classes));
  }

  /// Maps pictures [batch, channels, height, width] to logits [batch, classes].
  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(torch::relu(bn1(conv1(x))), 3, 2, 1);
    for (auto& layer : layers) x = layer->forward(x);
    return fc(torch::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
  }

  /// Replaces the last layer by one for `classes` with fresh weights, to fine-tune pretrained weights. Call before an
  /// optimizer or DistributedDataParallel takes the parameters.
  void replace_head(std::int64_t classes) {
    const auto like = fc->weight;
    fc = replace_module("fc", torch::nn::Linear(like.size(1), classes));
    fc->to(like.device(), like.scalar_type());
  }

  torch::nn::Conv2d conv1;
  torch::nn::BatchNorm2d bn1;
  std::array<torch::nn::Sequential, 4> layers;
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(ResNet);

}  // namespace models
