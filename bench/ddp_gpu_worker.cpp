// Steps of training on a GPU, plain and with DistributedDataParallel, for scripts/gpu_test.sh: one model, one line of JSON.
//
//   ddp_gpu_worker MODEL [STEPS [BACKEND]]      MODEL: resnet50 (batch 128, channels-last, bfloat16), gpt2 (16 x 1024, bfloat16), mlp (50 layers)
//
// Plain and data-parallel steps alternate in rounds, so that both find the machine in the same state; the medians count. The number of
// ranks comes from the environment.
#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include <maniple/maniple.h>

namespace {

namespace nn = torch::nn;
using torch::Tensor;

struct BottleneckImpl : nn::Module {
  BottleneckImpl(int in, int width, int stride) {
    const int out = 4 * width;
    body = register_module(
        "body", nn::Sequential(nn::Conv2d(nn::Conv2dOptions(in, width, 1).bias(false)), nn::BatchNorm2d(width),
                               nn::ReLU(nn::ReLUOptions(true)),
                               nn::Conv2d(nn::Conv2dOptions(width, width, 3).stride(stride).padding(1).bias(false)),
                               nn::BatchNorm2d(width), nn::ReLU(nn::ReLUOptions(true)),
                               nn::Conv2d(nn::Conv2dOptions(width, out, 1).bias(false)), nn::BatchNorm2d(out)));
    if (in != out || stride != 1) {
      shortcut = register_module(
          "shortcut",
          nn::Sequential(nn::Conv2d(nn::Conv2dOptions(in, out, 1).stride(stride).bias(false)), nn::BatchNorm2d(out)));
    }
  }
  Tensor forward(const Tensor& x) { return torch::relu(body->forward(x) + (shortcut ? shortcut->forward(x) : x)); }
  nn::Sequential body{nullptr}, shortcut{nullptr};
};
TORCH_MODULE(Bottleneck);

nn::Sequential resnet50() {
  nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 64, 7).stride(2).padding(3).bias(false)), nn::BatchNorm2d(64),
                     nn::ReLU(nn::ReLUOptions(true)), nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1)));
  int in = 64, stride = 1;
  for (const auto& [width, blocks] : {std::pair{64, 3}, {128, 4}, {256, 6}, {512, 3}}) {
    for (int b = 0; b < blocks; ++b) {
      net->push_back(Bottleneck(in, width, b == 0 ? stride : 1));
      in = 4 * width;
    }
    stride = 2;
  }
  net->push_back(nn::AdaptiveAvgPool2d(1));
  net->push_back(nn::Flatten());
  net->push_back(nn::Linear(2048, 1000));
  return net;
}

struct BlockImpl : nn::Module {
  BlockImpl(int width, int head_count)
      : heads(head_count),
        norm1(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})))),
        norm2(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})))),
        qkv(register_module("qkv", nn::Linear(width, 3 * width))),
        out(register_module("out", nn::Linear(width, width))),
        up(register_module("up", nn::Linear(width, 4 * width))),
        down(register_module("down", nn::Linear(4 * width, width))) {}
  Tensor forward(const Tensor& x) {
    const auto parts = qkv->forward(norm1->forward(x)).chunk(3, -1);
    const auto split = [&](const Tensor& t) { return t.view({t.size(0), t.size(1), heads, -1}).transpose(1, 2); };
    const Tensor attended =
        at::scaled_dot_product_attention(split(parts[0]), split(parts[1]), split(parts[2]), {}, 0.0, true);
    const Tensor y = x + out->forward(attended.transpose(1, 2).reshape(x.sizes()));
    return y + down->forward(torch::gelu(up->forward(norm2->forward(y))));
  }
  int heads;
  nn::LayerNorm norm1, norm2;
  nn::Linear qkv, out, up, down;
};
TORCH_MODULE(Block);

struct Gpt2Impl : nn::Module {
  Gpt2Impl() {
    constexpr int kWords = 50257, kWidth = 768;
    words = register_module("words", nn::Embedding(kWords, kWidth));
    places = register_module("places", nn::Embedding(1024, kWidth));
    for (int i = 0; i < 12; ++i) blocks->push_back(Block(kWidth, 12));
    register_module("blocks", blocks);
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    head = register_module("head", nn::Linear(nn::LinearOptions(kWidth, kWords).bias(false)));
  }
  Tensor forward(const Tensor& x) {
    const Tensor at = torch::arange(x.size(1), torch::TensorOptions().dtype(torch::kLong).device(x.device()));
    return head->forward(norm->forward(blocks->forward(words->forward(x) + places->forward(at))));
  }
  nn::Embedding words{nullptr}, places{nullptr};
  nn::Sequential blocks;
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};
};

/// SGD with momentum 0.9 on all parameters at once, as PyTorch's own does on a GPU.
struct FastSgd {
  explicit FastSgd(std::vector<Tensor> all) : parameters(std::move(all)) {
    for (const Tensor& p : parameters) momenta.push_back(torch::zeros_like(p));
  }
  void step() {
    const torch::NoGradGuard no_grad;
    std::vector<Tensor> gradients;
    for (const Tensor& p : parameters) gradients.push_back(p.grad());
    at::_foreach_mul_(momenta, 0.9);
    at::_foreach_add_(momenta, gradients);
    at::_foreach_add_(parameters, momenta, -1e-4);
  }
  void zero_grad() {
    for (Tensor& p : parameters) p.mutable_grad() = Tensor();
  }
  std::vector<Tensor> parameters, momenta;
};

struct Autocast {
  explicit Autocast(bool enable) : on(enable) {
    if (!on) return;
    at::autocast::set_autocast_dtype(at::kCUDA, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCUDA, true);
  }
  ~Autocast() {
    if (!on) return;
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCUDA, false);
  }
  bool on;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

template <class Module>
void measure(const std::string& name, const std::function<std::shared_ptr<Module>()>& make, const Tensor& x,
             const Tensor& y, bool bf16, int steps) {
  const torch::Device device(torch::kCUDA, 0);
  torch::manual_seed(1);
  const auto prepare = [&] {
    auto module = make();
    module->to(device);
    if (x.dim() == 4) {
      const torch::NoGradGuard no_grad;
      for (Tensor& p : module->parameters()) {
        if (p.dim() == 4) p.set_data(p.contiguous(torch::MemoryFormat::ChannelsLast));
      }
    }
    return module;
  };
  const auto plain = prepare(), wrapped = prepare();
  maniple::DistributedDataParallel<Module> ddp(wrapped);
  FastSgd plain_sgd(plain->parameters()), ddp_sgd(wrapped->parameters());
  const auto step = [&](Module& module, FastSgd& sgd) {
    sgd.zero_grad();
    Tensor loss;
    {
      const Autocast autocast(bf16);
      loss = torch::cross_entropy_loss(module.forward(x).flatten(0, -2), y.flatten());
    }
    loss.backward();
    sgd.step();
  };
  using Clock = std::chrono::steady_clock;
  const auto time = [&](Module& module, FastSgd& sgd, int count) {
    torch::cuda::synchronize();
    const auto from = Clock::now();
    for (int i = 0; i < count; ++i) step(module, sgd);
    torch::cuda::synchronize();
    return std::chrono::duration<double, std::milli>(Clock::now() - from).count() / count;
  };
  for (int i = 0; i < 5; ++i) {
    time(*plain, plain_sgd, 3);
    time(*wrapped, ddp_sgd, 3);
  }
  std::vector<double> plain_ms, ddp_ms;
  for (int round = 0; round < 7; ++round) {
    maniple::barrier();
    plain_ms.push_back(time(*plain, plain_sgd, steps));
    maniple::barrier();
    ddp_ms.push_back(time(*wrapped, ddp_sgd, steps));
  }
  const double without = median(plain_ms), with = median(ddp_ms);
  if (maniple::get_rank() == 0) {
    std::printf(
        "{\"model\": \"%s\", \"ranks\": %d, \"backend\": \"%s\", \"plain_ms\": %.3f, \"ddp_ms\": %.3f, "
        "\"overhead_percent\": %.2f}\n",
        name.c_str(), maniple::get_world_size(), maniple::get_backend().c_str(), without, with,
        (with / without - 1) * 100);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string model = argc > 1 ? argv[1] : "mlp";
  maniple::init_process_group({.backend = argc > 3 ? argv[3] : "cuda"});
  at::globalContext().setBenchmarkCuDNN(true);
  at::globalContext().setAllowTF32CuBLAS(true);
  const auto cuda = torch::TensorOptions().device(torch::kCUDA);
  const auto classes = cuda.dtype(torch::kLong);
  if (model == "resnet50") {
    const int batch = 128;
    measure<nn::SequentialImpl>(
        model, [] { return resnet50().ptr(); },
        torch::randn({batch, 3, 224, 224}, cuda).contiguous(torch::MemoryFormat::ChannelsLast),
        torch::randint(0, 1000, {batch}, classes), true, argc > 2 ? std::atoi(argv[2]) : 20);
  } else if (model == "gpt2") {
    const Tensor text = torch::randint(0, 50257, {16, 1024}, classes);
    measure<Gpt2Impl>(
        model, [] { return std::make_shared<Gpt2Impl>(); }, text, text, true, argc > 2 ? std::atoi(argv[2]) : 10);
  } else {
    measure<nn::SequentialImpl>(
        model,
        [] {
          nn::Sequential net;
          for (int i = 0; i < 50; ++i) {
            net->push_back(nn::Linear(64, 64));
            net->push_back(nn::ReLU());
          }
          net->push_back(nn::Linear(64, 10));
          return net.ptr();
        },
        torch::randn({32, 64}, cuda), torch::randint(0, 10, {32}, classes), false, argc > 2 ? std::atoi(argv[2]) : 50);
  }
  maniple::destroy_process_group();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "ddp_gpu_worker: %s\n", error.what());
  return 1;
}
