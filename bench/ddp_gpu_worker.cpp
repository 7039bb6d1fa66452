// One rank of the training in `maniple bench gpu`: steps on a GPU, plain and with DistributedDataParallel.
//
//   ddp_gpu_worker MODEL BACKEND ROUNDS KINDS      KINDS: some of plain,DDP,again,hooks,buckets,skip, in any order
//
// The other kinds split up the cost of DDP: `again` is a second plain one, which shows the noise; `hooks` is DDP under
// no_sync, which does not average; `buckets` is DDP without broadcasting buffers; `skip` does not train, but takes a
// stream from LibTorch's pool, so that the following kinds get other streams.
//
// MODEL: resnet50 (batch 128, channels-last, bfloat16), gpt2 (16 x 1024, bfloat16), mlp (50 layers of width 64, batch
// 32). A round runs steps of each kind, back to back; the host waits once at the end. The kinds alternate, so that they
// find the GPU in the same state, and medians over the rounds count. The optimizer is SGD with momentum on lists of
// tensors (foreach), PyTorch's default on a GPU. Rank 0 prints one JSON object per kind. The number of ranks comes from
// the environment; one rank takes the same path as several.
#include <ATen/autocast_mode.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

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

/// Like PyTorch's nn.Linear. LibTorch's own adds the bias in a separate pass if the input has more than two dimensions.
Tensor linear(const nn::Linear& layer, const Tensor& x) { return torch::linear(x, layer->weight, layer->bias); }

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
    const auto parts = linear(qkv, norm1->forward(x)).chunk(3, -1);
    const auto split = [&](const Tensor& t) { return t.view({t.size(0), t.size(1), heads, -1}).transpose(1, 2); };
    const Tensor attended =
        at::scaled_dot_product_attention(split(parts[0]), split(parts[1]), split(parts[2]), {}, 0.0, true);
    const Tensor y = x + linear(out, attended.transpose(1, 2).reshape(x.sizes()));
    return y + linear(down, torch::gelu(linear(up, norm2->forward(y))));
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
    return linear(head, norm->forward(blocks->forward(words->forward(x) + places->forward(at))));
  }
  nn::Embedding words{nullptr}, places{nullptr};
  nn::Sequential blocks;
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};
};

/// SGD with momentum 0.9 on all parameters at once, like PyTorch's on a GPU.
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

/// The training's data and settings.
struct Task {
  std::string name;
  Tensor x, y;
  bool bf16 = false;
  int steps = 10;          ///< per round
  std::int64_t items = 0;  ///< images, tokens or samples per step
  std::string kinds = {};
  int rounds = 7;
};

void print_row(const Task& task, const char* kind, std::vector<double> step_us, std::vector<double> host_us) {
  if (maniple::get_rank() != 0) return;
  std::printf(
      "{\"case\": \"%s\", \"system\": \"maniple\", \"kind\": \"%s\", \"ranks\": %d, \"us\": %.2f, "
      "\"enqueue_us\": %.2f, \"items\": %lld, \"note\": \"%s, SGD foreach\"}\n",
      task.name.c_str(), kind, maniple::get_world_size(), median(std::move(step_us)), median(std::move(host_us)),
      static_cast<long long>(task.items * maniple::get_world_size()), maniple::get_backend().c_str());
  std::fflush(stdout);
}

/// A module on the GPU with its optimizer, trained as one of the kinds.
template <class Module>
struct Trained {
  Trained(std::shared_ptr<Module> made, const Task& task, std::string how)
      : kind(std::move(how)), module(std::move(made)) {
    module->to(torch::Device(torch::kCUDA, 0));
    if (task.x.dim() == 4) {
      const torch::NoGradGuard no_grad;
      for (Tensor& p : module->parameters()) {
        if (p.dim() == 4) p.set_data(p.contiguous(torch::MemoryFormat::ChannelsLast));
      }
    }
    maniple::DdpOptions options;
    options.broadcast_buffers = kind != "buckets";
    const bool parallel = kind != "plain" && kind != "again";
    if (parallel) ddp = std::make_unique<maniple::DistributedDataParallel<Module>>(module, options);
    sgd = std::make_unique<FastSgd>(module->parameters());
  }

  /// Microseconds per step, and the host's microseconds for enqueueing it.
  std::pair<double, double> time(const Task& task, int count) {
    using Clock = std::chrono::steady_clock;
    std::unique_ptr<maniple::NoSync> alone;
    if (kind == "hooks") alone.reset(new maniple::NoSync(ddp->no_sync()));
    torch::cuda::synchronize();
    const auto from = Clock::now();
    for (int i = 0; i < count; ++i) {
      sgd->zero_grad();
      Tensor loss;
      {
        const Autocast autocast(task.bf16);
        loss = torch::cross_entropy_loss(module->forward(task.x).flatten(0, -2), task.y.flatten());
      }
      loss.backward();
      sgd->step();
    }
    const auto since = [&] { return std::chrono::duration<double, std::micro>(Clock::now() - from).count() / count; };
    const double enqueued = since();
    torch::cuda::synchronize();
    return {since(), enqueued};
  }

  std::string kind;
  std::shared_ptr<Module> module;
  std::unique_ptr<maniple::DistributedDataParallel<Module>> ddp;
  std::unique_ptr<FastSgd> sgd;
  std::vector<double> step_us, host_us;
};

template <class Module>
void measure(const Task& task, const std::function<std::shared_ptr<Module>()>& make) {
  torch::manual_seed(1);
  std::vector<std::unique_ptr<Trained<Module>>> all;
  std::istringstream kinds(task.kinds);
  for (std::string kind; std::getline(kinds, kind, ',');) {
    if (kind != "plain" && kind != "DDP" && kind != "again" && kind != "hooks" && kind != "buckets" && kind != "skip") {
      throw std::invalid_argument("no kind \"" + kind + "\"; expected plain, DDP, again, hooks, buckets or skip");
    }
    if (kind == "skip") {
      c10::cuda::getStreamFromPool(true);
    } else {
      all.push_back(std::make_unique<Trained<Module>>(make(), task, kind));
    }
  }
  for (int round = -2; round < task.rounds; ++round) {  // two to warm up
    for (const auto& one : all) {
      maniple::barrier();
      const auto [step_us, host_us] = one->time(task, task.steps);
      if (round < 0) continue;
      one->step_us.push_back(step_us);
      one->host_us.push_back(host_us);
    }
  }
  for (const auto& one : all) print_row(task, one->kind.c_str(), one->step_us, one->host_us);
}

nn::Sequential mlp() {
  nn::Sequential net;
  for (int i = 0; i < 50; ++i) {
    net->push_back(nn::Linear(64, 64));
    net->push_back(nn::ReLU());
  }
  net->push_back(nn::Linear(64, 10));
  return net;
}

void run(const std::string& model, Task task) {
  const auto cuda = torch::TensorOptions().device(torch::kCUDA);
  const auto classes = cuda.dtype(torch::kLong);
  task.name = model;
  if (model == "resnet50") {
    task.items = 128;
    task.x = torch::randn({task.items, 3, 224, 224}, cuda).contiguous(torch::MemoryFormat::ChannelsLast);
    task.y = torch::randint(0, 1000, {task.items}, classes);
    task.bf16 = true;
    measure<nn::SequentialImpl>(task, [] { return resnet50().ptr(); });
  } else if (model == "gpt2") {
    task.items = std::int64_t{16} * 1024;
    task.x = task.y = torch::randint(0, 50257, {16, 1024}, classes);
    task.bf16 = true;
    task.steps = 5;
    measure<Gpt2Impl>(task, [] { return std::make_shared<Gpt2Impl>(); });
  } else if (model == "mlp") {
    task.items = 32;
    task.x = torch::randn({task.items, 64}, cuda);
    task.y = torch::randint(0, 10, {task.items}, classes);
    task.steps = 40;
    measure<nn::SequentialImpl>(task, [] { return mlp().ptr(); });
  } else {
    throw std::invalid_argument("no model \"" + model + "\"; expected resnet50, gpt2 or mlp");
  }
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 5) {
    std::fprintf(stderr, "usage: ddp_gpu_worker resnet50|gpt2|mlp BACKEND ROUNDS plain,DDP,again,hooks,buckets,skip\n");
    return 2;
  }
  maniple::init_process_group({.backend = argv[2]});
  at::globalContext().setBenchmarkCuDNN(true);
  at::globalContext().setAllowTF32CuBLAS(true);
  Task task;
  task.rounds = std::max(1, std::atoi(argv[3]));
  task.kinds = argv[4];
  run(argv[1], std::move(task));
  maniple::barrier();
  maniple::destroy_process_group();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "ddp_gpu_worker: %s\n", error.what());
  return 1;
}
