// MNIST as in 05_ddp_mnist, with a Trainer. Apart from the net, a program needs only the 20 lines after "20 lines".
//
//   scripts/fetch_mnist.sh
//   build/bin/maniple run -n 2 build/bin/examples/09_trainer --epochs 2        or without maniple run, alone
//
// Options:
//   --data FOLDER         data/mnist by default; "drawn": digits drawn by the program
//   --epochs N  --lr X  --workers N
//   --batch-size N        of all ranks together
//   --strategy data|zero1|fully_sharded|tensor|pipeline
//                         how the ranks divide the training; each strategy loads the checkpoints of all others
//   --train-samples N, --test-samples N   0: all
//   --target X            fail if the accuracy stays below X
//   --checkpoint FOLDER   save there every --save-every N steps, and continue from there
//   --log FOLDER          for TensorBoard, and log.jsonl
#include <cstdio>
#include <string>

#include <torch/torch.h>

#include "arguments.h"
#include <maniple/maniple.h>

namespace {

/// The command line's values; your own program could use constants instead.
struct Arguments {
  Arguments(int argc, char** argv) {
    std::size_t steps = 100;
    read_arguments(argc, argv,
                   {{"--data", &data},
                    {"--checkpoint", &checkpoint},
                    {"--log", &log},
                    {"--strategy", &strategy},
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
  maniple::Strategy chosen_strategy() const {
    if (strategy == "data") return maniple::strategy::DataParallel{};
    if (strategy == "zero1") return maniple::strategy::Zero1{};
    if (strategy == "fully_sharded") return maniple::strategy::FullySharded{};
    if (strategy == "tensor") return maniple::strategy::TensorParallel{};
    if (strategy == "pipeline") return maniple::strategy::Pipeline{};
    throw std::invalid_argument("--strategy is data, zero1, fully_sharded, tensor or pipeline, not " + strategy);
  }
  maniple::Mnist train_digits() const { return digits(maniple::Mnist::Split::train, train_samples, 1); }
  maniple::Mnist test_digits() const { return digits(maniple::Mnist::Split::test, test_samples, 2); }
  maniple::Mnist digits(maniple::Mnist::Split split, std::size_t limit, std::uint64_t seed) const {
    if (data == "drawn") return maniple::Mnist::drawn(limit > 0 ? limit : 2000, seed);
    return maniple::Mnist(data, split, {.limit = limit});
  }
  std::string data = "data/mnist", checkpoint, log, strategy = "data";
  std::size_t epochs = 2, batch_size = 64, workers = 1, train_samples = 0, test_samples = 0;
  std::int64_t save_every = 0;
  double lr = 0.02, target = 0;
};

/// The same model for every strategy; TensorParallel divides its two large layers.
torch::nn::Sequential make_net(const maniple::Strategy& strategy) {
  namespace nn = torch::nn;
  nn::Sequential net(nn::Conv2d(1, 16, 5), nn::ReLU(), nn::MaxPool2d(2), nn::Conv2d(16, 32, 5), nn::ReLU(),
                     nn::MaxPool2d(2), nn::Flatten());
  if (std::holds_alternative<maniple::strategy::TensorParallel>(strategy)) {
    net->extend(*nn::Sequential(maniple::nn::ColumnParallelLinear(512, 128), nn::ReLU(), nn::Dropout(0.25),
                                maniple::nn::RowParallelLinear(128, 10)));
  } else {
    net->extend(*nn::Sequential(nn::Linear(512, 128), nn::ReLU(), nn::Dropout(0.25), nn::Linear(128, 10)));
  }
  net->push_back(nn::LogSoftmax(1));
  return net;
}

}  // namespace

int main(int argc, char** argv) try {
  const Arguments a(argc, argv);
  // 20 lines:
  maniple::init_process_group();
  maniple::seed_all(7, static_cast<std::uint64_t>(maniple::get_rank()));  // dropout differs between ranks
  const maniple::Strategy strategy = a.chosen_strategy();
  const auto train_data = a.train_digits(), test_data = a.test_digits();
  const auto of_train = maniple::divide_data(strategy, {.seed = 7});
  const auto of_test = maniple::divide_data(strategy, {.mode = maniple::SamplerMode::evaluation});
  const auto batch_size = maniple::per_process_batch_size(a.batch_size, of_train.num_replicas);
  maniple::DataLoader train(train_data, maniple::DistributedSampler(*train_data.size(), of_train),
                            {.batch_size = batch_size, .workers = a.workers, .seed = 7});
  maniple::DataLoader test(test_data, maniple::DistributedSampler(*test_data.size(), of_test), {.batch_size = 256});
  auto net = make_net(strategy);
  maniple::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(a.lr).momentum(0.9));
  const auto loss = maniple::criterion([](const auto& output, const auto& target, maniple::Metrics& metrics) {
    metrics.add_accuracy("accuracy", output, target);
    return torch::nll_loss(output, target);
  });
  const maniple::TrainerOptions options{.epochs = a.epochs,
                                        .checkpoint = {.folder = a.checkpoint},
                                        .save_every = a.save_every,
                                        .log_dir = a.log,
                                        .strategy = strategy};
  maniple::Trainer trainer(net, optimizer, options);
  const auto& end = trainer.fit(train, test, loss);

  if (end.end == maniple::TrainerEnd::stopped) return 0;  // possibly before the first evaluation
  if (end.evaluation["accuracy"] >= a.target) return 0;
  maniple::print_once("accuracy ", end.evaluation["accuracy"], " is below the target ", a.target);
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
