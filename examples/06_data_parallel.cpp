// Trains a network on MNIST with several cores of one process, and prints the speed-up.
//
//   scripts/fetch_mnist.sh
//   build/bin/examples/06_data_parallel --replicas 2
//
// The batch is split, each replica computes on its part, the outputs are concatenated, and the gradients are added.
//
// Options:
//   --data FOLDER        data/mnist by default; "drawn": digits drawn by the program
//   --replicas N  --epochs N  --batch-size N
//   --train-samples N    0: all
//   --target X           fail if the accuracy stays below X
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

#include <torch/torch.h>

#include <maniple/maniple.h>

namespace {

struct Arguments {
  std::string data = "data/mnist";
  std::size_t replicas = 2, epochs = 1, batch_size = 64, train_samples = 0;
  double target = 0;

  Arguments(int argc, char** argv) {
    for (int i = 1; i < argc; i += 2) {
      const std::string name = argv[i];
      const std::string value = i + 1 < argc ? argv[i + 1] : throw std::invalid_argument(name + " needs a value");
      if (name == "--data")
        data = value;
      else if (name == "--replicas")
        replicas = std::stoul(value);
      else if (name == "--epochs")
        epochs = std::stoul(value);
      else if (name == "--batch-size")
        batch_size = std::stoul(value);
      else if (name == "--train-samples")
        train_samples = std::stoul(value);
      else if (name == "--target")
        target = std::stod(value);
      else
        throw std::invalid_argument("unknown option " + name + "; the head of 06_data_parallel.cpp lists them");
    }
  }
  maniple::Mnist load(maniple::Mnist::Split split) const {
    const bool train = split == maniple::Mnist::Split::train;
    if (data == "drawn")
      return maniple::Mnist::drawn(train && train_samples > 0 ? train_samples : train ? 20000 : 1000, train ? 1 : 2);
    return maniple::Mnist(data, split, {.limit = train ? train_samples : 0});
  }
};

/// Cloneable, so that DataParallel can create replicas; therefore reset() creates the submodules.
struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    conv1 = register_module("conv1", torch::nn::Conv2d(1, 32, 3));
    conv2 = register_module("conv2", torch::nn::Conv2d(32, 64, 3));
    fc1 = register_module("fc1", torch::nn::Linear(9216, 128));
    fc2 = register_module("fc2", torch::nn::Linear(128, 10));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(conv2->forward(torch::relu(conv1->forward(x))));
    x = torch::relu(fc1->forward(torch::max_pool2d(x, 2).flatten(1)));
    return torch::log_softmax(fc2->forward(x), 1);
  }
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(Net);

struct StepTimes {
  double alone = 1e9, parallel = 1e9;
};

/// The fastest of several steps in milliseconds, with the module alone and with its replicas, measured in turn.
template <class Parallel>
StepTimes step_ms(Net net, const Parallel& dp, std::int64_t batch_size) {
  const auto x = torch::randn({batch_size, 1, 28, 28}), y = torch::randint(10, {batch_size}, torch::kInt64);
  torch::optim::SGD optimizer(net->parameters(), 1e-6);
  const auto time = [&](const auto& model) {
    const auto start = std::chrono::steady_clock::now();
    net->zero_grad();
    torch::nll_loss(model->forward(x), y).backward();
    optimizer.step();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  };
  StepTimes best;
  for (int i = 0; i < 12; ++i) best = {std::min(best.alone, time(net.ptr())), std::min(best.parallel, time(dp))};
  return best;
}

}  // namespace

int main(int argc, char** argv) try {
  const Arguments arguments(argc, argv);
  maniple::apply_fast_settings();
  torch::set_num_threads(1);  // one core for the single module, and one per replica
  maniple::seed_all(7);

  Net net;
  const maniple::DataParallel dp(net, {.devices = std::vector<torch::Device>(arguments.replicas, torch::kCPU)});
  const auto [alone, parallel] = step_ms(net, dp, static_cast<std::int64_t>(arguments.batch_size));
  std::printf("a step of %zu images: %.1f ms with the module alone, %.1f ms with %zu replicas, %.2f times as fast\n",
              arguments.batch_size, alone, parallel, arguments.replicas, alone / parallel);

  const auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
      arguments.load(maniple::Mnist::Split::train).map(torch::data::transforms::Stack<>()), arguments.batch_size);
  const auto test = arguments.load(maniple::Mnist::Split::test).map(torch::data::transforms::Stack<>());
  const auto test_loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(test, 500);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  double accuracy = 0;
  for (std::size_t epoch = 0; epoch < arguments.epochs; ++epoch) {
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      torch::nll_loss(dp.forward(batch.data), batch.target).backward();  // also runs in parallel in the replicas
      optimizer.step();
    }
    const torch::NoGradGuard no_grad;
    double correct = 0;
    for (auto& batch : *test_loader)
      correct += dp.forward(batch.data).argmax(1).eq(batch.target).sum().template item<double>();
    accuracy = correct / static_cast<double>(test.size().value());
    std::printf("epoch %zu: accuracy %.2f %%\n", epoch + 1, 100 * accuracy);
  }
  if (accuracy < arguments.target) throw std::runtime_error("the accuracy is below the target");
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
