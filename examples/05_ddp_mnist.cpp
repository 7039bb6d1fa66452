// Trains a small convolutional network on MNIST with several ranks.
//
//   scripts/fetch_mnist.sh
//   build/bin/maniple run -n 2 build/bin/examples/05_ddp_mnist --epochs 2
//
// Options:
//   --data FOLDER         data/mnist by default; "drawn": digits drawn by the program
//   --epochs N  --lr X  --workers N
//   --batch-size N        of all ranks together
//   --train-samples N, --test-samples N   0: all
//   --target X            fail if the accuracy stays below X
//   --checkpoint FOLDER   save there every --save-every N steps, in the background. A new start continues from there,
//                         also in the middle of an epoch and with another number of ranks.
//   --device cpu, cuda
//   --backend NAME        nccl if each rank has a GPU, cuda if ranks share one (docs/gpu.md)
//
// SIGTERM and Ctrl-C save a checkpoint and end the program.
#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>

#include <torch/torch.h>

#include "arguments.h"
#include <maniple/maniple.h>

namespace {

struct Arguments {
  std::string data = "data/mnist", checkpoint, device = "cpu", backend = "native";
  std::size_t epochs = 2, batch_size = 64, workers = 1, train_samples = 0, test_samples = 0, save_every = 100;
  double lr = 0.02, target = 0;

  Arguments(int argc, char** argv) {
    read_arguments(argc, argv,
                   {{"--data", &data},
                    {"--checkpoint", &checkpoint},
                    {"--device", &device},
                    {"--backend", &backend},
                    {"--lr", &lr},
                    {"--target", &target},
                    {"--epochs", &epochs},
                    {"--batch-size", &batch_size},
                    {"--workers", &workers},
                    {"--save-every", &save_every},
                    {"--train-samples", &train_samples},
                    {"--test-samples", &test_samples}});
  }
  maniple::Mnist load(maniple::Mnist::Split split) const {
    const bool train = split == maniple::Mnist::Split::train;
    const std::size_t limit = train ? train_samples : test_samples;
    if (data == "drawn") return maniple::Mnist::drawn(limit > 0 ? limit : train ? 20000 : 2000, train ? 1 : 2);
    return maniple::Mnist(data, split, {.limit = limit});
  }
};

torch::nn::Sequential make_net() {
  namespace nn = torch::nn;
  return nn::Sequential(nn::Conv2d(1, 16, 5), nn::ReLU(), nn::MaxPool2d(2), nn::Conv2d(16, 32, 5), nn::ReLU(),
                        nn::MaxPool2d(2), nn::Flatten(), nn::Linear(512, 128), nn::ReLU(), nn::Dropout(0.25),
                        nn::Linear(128, 10), nn::LogSoftmax(1));
}

/// Every rank evaluates its part. In evaluation mode the parts together are exactly the set, so the sum over ranks is
/// exact.
double accuracy(torch::nn::Sequential& net, const maniple::Mnist& set, torch::Device device) {
  const torch::NoGradGuard no_grad;
  net->eval();
  maniple::DistributedSampler sampler(set.size().value(), {.shuffle = false, .mode = maniple::SamplerMode::evaluation});
  const auto loader =
      torch::data::make_data_loader(maniple::Mnist(set).map(torch::data::transforms::Stack<>()), sampler, 256);
  const auto counts = torch::zeros({2}, torch::TensorOptions(device).dtype(torch::kInt64));  // correct, total
  for (auto& batch : maniple::prefetch_to(device, *loader)) {
    counts[0] += net->forward(batch.data).argmax(1).eq(batch.target).sum();
    counts[1] += batch.target.size(0);
  }
  maniple::all_reduce(counts);
  net->train();
  return counts[0].item<double>() / counts[1].item<double>();
}

}  // namespace

int main(int argc, char** argv) try {
  const Arguments arguments(argc, argv);
  maniple::init_process_group({.backend = arguments.backend});
  const int rank = maniple::get_rank(), ranks = maniple::get_world_size();
  const auto settings = maniple::apply_fast_settings({.threads = 1});
  const auto device =
      device_named<torch::Device>(arguments.device, maniple::get_local_rank(), torch::cuda::device_count());
  if (rank == 0) std::fprintf(stderr, "%d ranks; %s\n", ranks, settings.text().c_str());
  maniple::seed_all(7, static_cast<std::uint64_t>(rank));  // dropout differs between ranks; DDP makes the weights equal

  auto train = arguments.load(maniple::Mnist::Split::train);
  const auto test = arguments.load(maniple::Mnist::Split::test);
  const std::size_t batch_size = maniple::per_process_batch_size(arguments.batch_size, ranks);
  maniple::DistributedSampler sampler(train.size().value(), {.shuffle = true, .seed = 7});
  const auto loader =
      torch::data::make_data_loader(train.map(torch::data::transforms::Stack<>()), sampler,
                                    torch::data::DataLoaderOptions().batch_size(batch_size).workers(arguments.workers));

  auto batches = maniple::prefetch_to(device, *loader);  // on a GPU: copies ahead while the loop computes
  auto net = make_net();
  net->to(device);
  maniple::DistributedDataParallel ddp(net);  // broadcasts rank 0's weights; averages gradients in backward
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(arguments.lr).momentum(0.9));

  std::size_t step = 0;
  std::optional<maniple::Checkpoint> checkpoint;
  if (!arguments.checkpoint.empty()) {
    checkpoint.emplace(maniple::CheckpointOptions{.folder = arguments.checkpoint});
    checkpoint->add("model", *net).add("optimizer", optimizer).add("sampler", sampler);
    step = static_cast<std::size_t>(checkpoint->load().value_or(0));
    if (rank == 0 && step > 0) std::printf("going on after step %zu: %s\n", step, sampler.cursor_text().c_str());
  }
  const auto save = [&] {
    if (checkpoint) checkpoint->save(static_cast<std::int64_t>(step));
  };

  maniple::GracefulStop stop;
  double reached = sampler.epoch() < arguments.epochs ? 0 : accuracy(net, test, device);  // already trained
  for (std::size_t epoch = sampler.epoch(); epoch < arguments.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    maniple::Progress progress(sampler.local_batches(batch_size),
                               {.label = "epoch " + std::to_string(epoch + 1), .unit = "samples"});
    for (auto& batch : sampler.counting(batches)) {
      optimizer.zero_grad();
      const auto loss = torch::nll_loss(ddp.forward(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      progress.step(batch.data.size(0), progress.is_due() ? "loss " + std::to_string(loss.item<float>()) : "");
      const bool stopping = stop.requested_anywhere();  // the same value on all ranks
      if (++step % std::max<std::size_t>(arguments.save_every, 1) == 0 || stopping) save();
      if (stopping) return 0;
    }
    progress.finish();
    reached = accuracy(net, test, device);
    if (rank == 0)
      std::printf("epoch %zu: accuracy %.2f %% on %zu test images\n", epoch + 1, 100 * reached, test.size().value());
    save();  // after all work of this epoch, so that a new start continues with the next epoch
  }
  if (reached >= arguments.target) return 0;
  if (rank == 0) std::fprintf(stderr, "accuracy %.4f is below the target %.4f\n", reached, arguments.target);
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
