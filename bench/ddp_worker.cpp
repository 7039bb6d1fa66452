// One rank of `maniple bench ddp`: trains a model with and without gradient averaging, and reports the time of a step.
//
//   ddp_worker MODEL RANK RANKS INIT_METHOD STEPS SECONDS      rank 0 prints one JSON object
//
// The method is the same as in ddp_torch.py: one computing thread, on this rank's share of the cores; a step is
// zero_grad, forward, cross entropy, backward, SGD. Steps without averaging (no_sync) and with averaging alternate in
// short blocks, so that disturbances of the machine hit both. All ranks begin a block together; the slowest rank's time
// counts. The figure is the median over blocks, divided by the steps per block.
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include "tools/bench/work_item.h"
#include <maniple/maniple.h>

namespace {

using torch::Tensor;

/// The network of PyTorch's MNIST example, without its dropout.
struct MnistCnn : torch::nn::Module {
  torch::nn::Conv2d c1{register_module("c1", torch::nn::Conv2d(1, 32, 3))},
      c2{register_module("c2", torch::nn::Conv2d(32, 64, 3))};
  torch::nn::Linear f1{register_module("f1", torch::nn::Linear(9216, 128))},
      f2{register_module("f2", torch::nn::Linear(128, 10))};
  Tensor forward(Tensor x) {
    x = torch::relu(c2(torch::relu(c1(x))));
    return f2(torch::relu(f1(torch::max_pool2d(x, 2).flatten(1))));
  }
};

struct Mlp : torch::nn::Module {
  Mlp(int layers, int width) {
    for (int i = 0; i < layers; ++i) {
      net->push_back(torch::nn::Linear(width, width));
      net->push_back(torch::nn::ReLU());
    }
    net->push_back(torch::nn::Linear(width, 10));
    register_module("net", net);
  }
  Tensor forward(Tensor x) { return net->forward(x); }
  torch::nn::Sequential net;
};

constexpr std::int64_t kWidth = 256, kHeads = 8, kVocabulary = 256;

/// Like PyTorch's nn.Linear. LibTorch's own adds the bias in a separate pass if the input has more than two dimensions.
Tensor linear(const torch::nn::Linear& layer, const Tensor& x) { return torch::linear(x, layer->weight, layer->bias); }

struct Block : torch::nn::Module {
  torch::nn::LayerNorm n1{register_module("n1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))};
  torch::nn::LayerNorm n2{register_module("n2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))};
  torch::nn::Linear qkv{register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(kWidth, kWidth))};
  torch::nn::Linear up{register_module("up", torch::nn::Linear(kWidth, 4 * kWidth))};
  torch::nn::Linear down{register_module("down", torch::nn::Linear(4 * kWidth, kWidth))};
  Tensor forward(Tensor x) {
    const std::int64_t batch = x.size(0), length = x.size(1);
    const auto heads = linear(qkv, n1(x)).view({batch, length, 3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4});
    const Tensor weights =
        torch::softmax(heads[0].matmul(heads[1].transpose(-2, -1)) * std::sqrt(double(kHeads) / kWidth), -1);
    x = x + linear(out, weights.matmul(heads[2]).transpose(1, 2).reshape({batch, length, kWidth}));
    return x + linear(down, torch::gelu(linear(up, n2(x))));
  }
};

struct Transformer : torch::nn::Module {
  Transformer() {
    for (int i = 0; i < 6; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<Block>()));
  }
  torch::nn::Embedding e{register_module("e", torch::nn::Embedding(kVocabulary, kWidth))};
  torch::nn::Linear h{register_module("h", torch::nn::Linear(kWidth, kVocabulary))};
  std::vector<std::shared_ptr<Block>> blocks;
  Tensor forward(const Tensor& tokens) {
    Tensor x = e(tokens);
    for (const auto& block : blocks) x = block->forward(x);
    return linear(h, x).flatten(0, 1);
  }
};

struct Task {
  std::string model;
  int rank, ranks;
  std::string init_method;
  int steps;       // of each kind; 0: limited only by `seconds`
  double seconds;  // for each kind
};

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// MANIPLE_BENCH_OVERLAP selects the kind of overlap, for comparisons; unset: the default that users get.
maniple::Overlap overlap() {
  const char* wished = std::getenv("MANIPLE_BENCH_OVERLAP");
  if (wished == nullptr) return maniple::Overlap::automatic;
  const std::map<std::string, maniple::Overlap> ways = {
      {"none", maniple::Overlap::none}, {"inline", maniple::Overlap::inline_}, {"thread", maniple::Overlap::thread}};
  return ways.at(wished);
}

template <class Net>
nlohmann::ordered_json measure(const Task& task, std::shared_ptr<Net> net, const Tensor& x, const Tensor& y) {
  maniple::DistributedDataParallel<Net> ddp(net, {.overlap = overlap()});
  torch::optim::SGD optimizer(net->parameters(), 1e-3);
  const auto step = [&] {
    net->zero_grad(false);
    torch::nn::functional::cross_entropy(ddp->forward(x), y).backward();
    optimizer.step();
  };
  const auto block = [&](bool sync, int steps) {
    maniple::barrier();
    const auto start = Clock::now();
    if (sync) {
      for (int i = 0; i < steps; ++i) step();
    } else {
      const auto guard = ddp.no_sync();
      for (int i = 0; i < steps; ++i) step();
    }
    const Tensor slowest = torch::tensor({seconds_since(start)}, torch::kFloat64);
    maniple::all_reduce(slowest, maniple::ReduceOp::max);
    return slowest.item<double>() / steps;
  };
  for (int i = 0; i < 3; ++i) block(true, 1), block(false, 1);
  const double guess = std::min(block(true, 2), block(false, 2));
  const int steps = std::clamp(static_cast<int>(0.1 / guess), 2, 20);
  const int blocks =
      std::max(5, task.steps > 0 ? task.steps / steps : static_cast<int>(task.seconds / (guess * steps)));
  std::vector<double> without, with;
  for (int i = 0; i < blocks; ++i) {
    without.push_back(block(false, steps));
    with.push_back(block(true, steps));
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const Tensor peak = torch::tensor({static_cast<double>(usage.ru_maxrss) / 1024}, torch::kFloat64);
  maniple::all_reduce(peak, maniple::ReduceOp::max);
  if (std::getenv("MANIPLE_BENCH_VERBOSE") != nullptr && task.rank == 0)
    std::fputs(ddp.statistics().text().c_str(), stderr);
  const double nosync_ms = maniple::bench::median(without) * 1e3, ddp_ms = maniple::bench::median(with) * 1e3;
  return {{"system", "maniple"},
          {"model", task.model},
          {"ranks", task.ranks},
          {"nosync_ms", nosync_ms},
          {"ddp_ms", ddp_ms},
          {"efficiency", nosync_ms / ddp_ms},
          {"peak_rss_mb", peak.item<double>()},
          {"overlap", ddp.statistics().overlap}};
}

const std::map<std::string, std::function<nlohmann::ordered_json(const Task&)>> kModels = {
    {"mnist_cnn",
     [](const Task& task) {
       return measure(task, std::make_shared<MnistCnn>(), torch::randn({32, 1, 28, 28}),
                      torch::randint(10, {32}, torch::kInt64));
     }},
    {"mlp25m",
     [](const Task& task) {
       return measure(task, std::make_shared<Mlp>(6, 2048), torch::randn({32, 2048}),
                      torch::randint(10, {32}, torch::kInt64));
     }},
    {"gpt5m",
     [](const Task& task) {
       return measure(task, std::make_shared<Transformer>(), torch::randint(kVocabulary, {4, 128}, torch::kInt64),
                      torch::randint(kVocabulary, {512}, torch::kInt64));
     }},
    {"tiny50",
     [](const Task& task) {
       return measure(task, std::make_shared<Mlp>(50, 32), torch::randn({16, 32}),
                      torch::randint(10, {16}, torch::kInt64));
     }},
};

void use_own_cores(int rank, int ranks) {
  const int cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const int each = std::max(1, cores / ranks);
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (int i = 0; i < each; ++i) CPU_SET(static_cast<std::size_t>((rank * each + i) % cores), &mask);
  sched_setaffinity(0, sizeof mask, &mask);  // best effort: a container may forbid it
  torch::set_num_threads(1);
#ifdef __aarch64__
  at::globalContext().setUserEnabledMkldnn(false);  // its convolutions are several times slower than BLAS there
#endif
}

int work(int argc, char** argv) {
  if (argc != 7 || !kModels.contains(argv[1])) {
    std::fprintf(stderr, "usage: ddp_worker mnist_cnn|mlp25m|gpt5m|tiny50 RANK RANKS INIT_METHOD STEPS SECONDS\n");
    return 2;
  }
  const Task task{argv[1], std::atoi(argv[2]), std::atoi(argv[3]), argv[4], std::atoi(argv[5]), std::atof(argv[6])};
  use_own_cores(task.rank, task.ranks);
  maniple::InitOptions options;
  options.init_method = task.init_method;
  options.rank = task.rank;
  options.world_size = task.ranks;
  options.timeout = std::chrono::seconds(120);
  maniple::init_process_group(options);
  maniple::seed_all(1);
  const nlohmann::ordered_json row = kModels.at(task.model)(task);
  if (task.rank == 0) std::printf("%s\n", row.dump().c_str());
  maniple::barrier();
  maniple::destroy_process_group();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return work(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
