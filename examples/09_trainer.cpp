// MNIST again, as in 05_ddp_mnist, with a Trainer: what is left to write is the model, the loss and the data.
//
//   scripts/fetch_mnist.sh
//   build/bin/maniple run -n 2 build/bin/examples/09_trainer --epochs 2        or without maniple run, alone
//
// --data FOLDER (data/mnist; "drawn": digits drawn by the program)  --epochs N  --batch-size N (all ranks together)  --lr X
// --workers N  --train-samples N, --test-samples N (0: all)  --target X: fail when the accuracy stays below
// --checkpoint FOLDER: save there every --save-every N steps, and go on from there  --log FOLDER: for TensorBoard, and log.jsonl
#include <cstdio>
#include <string>

#include <torch/torch.h>

#include "arguments.h"
#include <maniple/maniple.h>

int main(int argc, char** argv) try {
  std::string data = "data/mnist", checkpoint, log;
  std::size_t epochs = 2, batch_size = 64, workers = 1, train_samples = 0, test_samples = 0, save_every = 100;
  double lr = 0.02, target = 0;
  read_arguments(argc, argv,
                 {{"--data", &data},
                  {"--checkpoint", &checkpoint},
                  {"--log", &log},
                  {"--lr", &lr},
                  {"--target", &target},
                  {"--epochs", &epochs},
                  {"--batch-size", &batch_size},
                  {"--workers", &workers},
                  {"--save-every", &save_every},
                  {"--train-samples", &train_samples},
                  {"--test-samples", &test_samples}});
  const auto digits = [&](maniple::Mnist::Split split, std::size_t limit, std::uint64_t seed) {
    if (data == "drawn") return maniple::Mnist::drawn(limit > 0 ? limit : 2000, seed);
    return maniple::Mnist(data, split, {.limit = limit});
  };
  maniple::init_process_group();
  maniple::apply_fast_settings({.threads = 1});
  maniple::seed_all(7, static_cast<std::uint64_t>(maniple::get_rank()));  // dropout differs between ranks

  namespace nn = torch::nn;
  nn::Sequential net(nn::Conv2d(1, 16, 5), nn::ReLU(), nn::MaxPool2d(2), nn::Conv2d(16, 32, 5), nn::ReLU(),
                     nn::MaxPool2d(2), nn::Flatten(), nn::Linear(512, 128), nn::ReLU(), nn::Dropout(0.25),
                     nn::Linear(128, 10), nn::LogSoftmax(1));
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(lr).momentum(0.9));
  maniple::TrainerOptions options;
  options.epochs = epochs;
  options.checkpoint.folder = checkpoint;
  options.save_every = static_cast<std::int64_t>(save_every);
  options.monitor = "accuracy";
  options.mode = maniple::StopMode::max;
  options.log_dir = log;
  options.on_epoch = [](const maniple::TrainerState& state) {
    maniple::print_once("epoch ", state.epoch, ": accuracy ", state.evaluation["accuracy"]);
  };
  maniple::Trainer trainer(net, optimizer, options);
  const auto loss = [&](auto& batch, maniple::Metrics& metrics) {
    const auto output = net->forward(batch.data);
    metrics.add_accuracy("accuracy", output, batch.target);
    return torch::nll_loss(output, batch.target);
  };

  // Training: equally many samples on each rank, in another order in each epoch. Test: each sample once, over all ranks.
  maniple::DataLoader train(
      digits(maniple::Mnist::Split::train, train_samples, 1),
      {.batch_size = maniple::per_process_batch_size(batch_size, trainer.ranks()), .workers = workers, .seed = 7});
  const auto test_digits = digits(maniple::Mnist::Split::test, test_samples, 2);
  maniple::DataLoader test(test_digits,
                           maniple::DistributedSampler(test_digits.size().value(),
                                                       {.shuffle = false, .mode = maniple::SamplerMode::evaluation}),
                           {.batch_size = 256});

  const auto& end = trainer.fit(train, test, loss);
  if (end.end == maniple::TrainerEnd::stopped || end.evaluation["accuracy"] >= target) return 0;
  maniple::print_once("accuracy ", end.evaluation["accuracy"], " is below the target ", target);
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
