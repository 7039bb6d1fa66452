// MNIST again, as in 05_ddp_mnist, with a Trainer: what is left to write are 15 lines besides the net, from "15 lines" on.
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

namespace {

/// What the command line says; a program of one's own has numbers in their places.
struct Arguments {
  Arguments(int argc, char** argv) {
    std::size_t steps = 100;
    read_arguments(argc, argv,
                   {{"--data", &data},
                    {"--checkpoint", &checkpoint},
                    {"--log", &log},
                    {"--lr", &lr},
                    {"--target", &target},
                    {"--epochs", &epochs},
                    {"--batch-size", &batch_size},
                    {"--workers", &workers},
                    {"--save-every", &steps},
                    {"--train-samples", &train_samples},
                    {"--test-samples", &test_samples}});
    save_every = static_cast<std::int64_t>(steps);
  }
  maniple::Mnist train_digits() const { return digits(maniple::Mnist::Split::train, train_samples, 1); }
  maniple::Mnist test_digits() const { return digits(maniple::Mnist::Split::test, test_samples, 2); }
  maniple::Mnist digits(maniple::Mnist::Split split, std::size_t limit, std::uint64_t seed) const {
    if (data == "drawn") return maniple::Mnist::drawn(limit > 0 ? limit : 2000, seed);
    return maniple::Mnist(data, split, {.limit = limit});
  }
  std::string data = "data/mnist", checkpoint, log;
  std::size_t epochs = 2, batch_size = 64, workers = 1, train_samples = 0, test_samples = 0;
  std::int64_t save_every = 0;
  double lr = 0.02, target = 0;
};

torch::nn::Sequential make_net() {
  namespace nn = torch::nn;
  return nn::Sequential(nn::Conv2d(1, 16, 5), nn::ReLU(), nn::MaxPool2d(2), nn::Conv2d(16, 32, 5), nn::ReLU(),
                        nn::MaxPool2d(2), nn::Flatten(), nn::Linear(512, 128), nn::ReLU(), nn::Dropout(0.25),
                        nn::Linear(128, 10), nn::LogSoftmax(1));
}

}  // namespace

int main(int argc, char** argv) try {
  const Arguments a(argc, argv);
  // 15 lines:
  maniple::init_process_group();
  maniple::seed_all(7, static_cast<std::uint64_t>(maniple::get_rank()));  // dropout differs between ranks
  const auto batch_size = maniple::per_process_batch_size(a.batch_size, maniple::get_world_size());
  maniple::DataLoader train(a.train_digits(), {.batch_size = batch_size, .workers = a.workers, .seed = 7});
  maniple::DataLoader test(a.test_digits(), {.batch_size = 256, .mode = maniple::SamplerMode::evaluation});
  auto net = make_net();
  maniple::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(a.lr).momentum(0.9));
  const auto loss = [&](auto& batch, maniple::Metrics& metrics) {
    const auto output = net->forward(batch.data);
    metrics.add_accuracy("accuracy", output, batch.target);
    return torch::nll_loss(output, batch.target);
  };
  maniple::Trainer trainer(
      net, optimizer,
      {.epochs = a.epochs, .checkpoint = {.folder = a.checkpoint}, .save_every = a.save_every, .log_dir = a.log});
  const auto& end = trainer.fit(train, test, loss);

  if (end.end == maniple::TrainerEnd::stopped) return 0;  // perhaps before there was an evaluation
  if (end.evaluation["accuracy"] >= a.target) return 0;
  maniple::print_once("accuracy ", end.evaluation["accuracy"], " is below the target ", a.target);
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
