// A small convolutional network learns MNIST on several ranks.
//
//   scripts/fetch_mnist.sh
//   build/bin/maniple run -n 2 build/bin/examples/05_ddp_mnist --epochs 2
//
// --data FOLDER (data/mnist; "drawn": digits drawn by the program)  --epochs N  --batch-size N (all ranks together)  --lr X
// --workers N  --train-samples N, --test-samples N (0: all)  --target X: fail when the accuracy stays below
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

#include <torch/torch.h>

#include <maniple/maniple.h>

namespace {

struct Arguments {
  std::string data = "data/mnist";
  std::size_t epochs = 2, batch_size = 64, workers = 1, train_samples = 0, test_samples = 0;
  double lr = 0.02, target = 0;

  Arguments(int argc, char** argv) {
    for (int i = 1; i < argc; i += 2) {
      const std::string name = argv[i];
      const std::string value = i + 1 < argc ? argv[i + 1] : throw std::invalid_argument(name + " needs a value");
      if (name == "--data") data = value;
      else if (name == "--epochs") epochs = std::stoul(value);
      else if (name == "--batch-size") batch_size = std::stoul(value);
      else if (name == "--workers") workers = std::stoul(value);
      else if (name == "--train-samples") train_samples = std::stoul(value);
      else if (name == "--test-samples") test_samples = std::stoul(value);
      else if (name == "--lr") lr = std::stod(value);
      else if (name == "--target") target = std::stod(value);
      else throw std::invalid_argument("unknown option " + name + "; the head of 05_ddp_mnist.cpp lists them");
    }
  }
  maniple::Mnist load(maniple::Mnist::Split split) const {
    const bool train = split == maniple::Mnist::Split::train;
    const std::size_t limit = train ? train_samples : test_samples;
    if (data == "drawn") return maniple::Mnist::drawn(limit > 0 ? limit : train ? 20000 : 2000, train ? 1 : 2);
    return maniple::Mnist(data, split, {.limit = limit});
  }
};

struct Net : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(torch::relu(conv1->forward(x)), 2);
    x = torch::max_pool2d(torch::relu(conv2->forward(x)), 2);
    x = torch::relu(fc1->forward(x.flatten(1)));
    return torch::log_softmax(fc2->forward(torch::dropout(x, 0.25, is_training())), 1);
  }
  torch::nn::Conv2d conv1 = register_module("conv1", torch::nn::Conv2d(1, 16, 5));
  torch::nn::Conv2d conv2 = register_module("conv2", torch::nn::Conv2d(16, 32, 5));
  torch::nn::Linear fc1 = register_module("fc1", torch::nn::Linear(512, 128));
  torch::nn::Linear fc2 = register_module("fc2", torch::nn::Linear(128, 10));
};

/// Every rank judges its part; in evaluation mode the parts together are the set, so the sum over ranks is exact.
double accuracy(Net& net, const maniple::Mnist& set) {
  const torch::NoGradGuard no_grad;
  net.eval();
  maniple::DistributedSampler sampler(set.size().value(), {.shuffle = false, .mode = maniple::SamplerMode::evaluation});
  const auto loader = torch::data::make_data_loader(maniple::Mnist(set).map(torch::data::transforms::Stack<>()), sampler, 256);
  const auto counts = torch::zeros({2}, torch::kInt64);  // right, all
  for (auto& batch : *loader) {
    counts[0] += net.forward(batch.data).argmax(1).eq(batch.target).sum();
    counts[1] += batch.target.size(0);
  }
  maniple::all_reduce(counts);
  net.train();
  return counts[0].item<double>() / counts[1].item<double>();
}

}  // namespace

int main(int argc, char** argv) try {
  const Arguments arguments(argc, argv);
  maniple::init_process_group();
  const int rank = maniple::get_rank();
  const int ranks = maniple::get_world_size();
  const auto settings = maniple::apply_fast_settings({.threads = 1});
  if (rank == 0) std::fprintf(stderr, "%d ranks; %s\n", ranks, settings.text().c_str());
  maniple::seed_all(7, static_cast<std::uint64_t>(rank));  // dropout differs between ranks; DDP makes the weights equal

  auto train = arguments.load(maniple::Mnist::Split::train);
  const auto test = arguments.load(maniple::Mnist::Split::test);
  const std::size_t batch_size = maniple::per_process_batch_size(arguments.batch_size, ranks);
  maniple::DistributedSampler sampler(train.size().value(), {.shuffle = true, .seed = 7});
  const auto loader = torch::data::make_data_loader(train.map(torch::data::transforms::Stack<>()), sampler,
      torch::data::DataLoaderOptions().batch_size(batch_size).workers(arguments.workers));

  auto net = std::make_shared<Net>();
  maniple::DistributedDataParallel<Net> ddp(net);  // rank 0's weights everywhere; gradients are averaged in backward
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(arguments.lr).momentum(0.9));

  double reached = 0;
  for (std::size_t epoch = 0; epoch < arguments.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    maniple::Progress progress(sampler.local_batches(batch_size), {.label = "epoch " + std::to_string(epoch + 1), .unit = "samples"});
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      const auto loss = torch::nll_loss(ddp->forward(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      progress.step(batch.data.size(0) * ranks, progress.is_due() ? "loss " + std::to_string(loss.item<float>()) : "");
    }
    progress.finish();
    reached = accuracy(*net, test);
    if (rank == 0) std::printf("epoch %zu: accuracy %.2f %% on %zu test images\n", epoch + 1, 100 * reached, test.size().value());
  }
  if (reached >= arguments.target) return 0;
  if (rank == 0) std::fprintf(stderr, "accuracy %.4f is below the target %.4f\n", reached, arguments.target);
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
