// Trains while its processes are killed and replaced. The weights are the same as without kills, bit for bit.
//
//   build/bin/maniple run -n 4 build/bin/examples/13_elastic                                  prints a hash
//   build/bin/maniple run -n 1 build/bin/examples/13_elastic                                  the same hash
//   build/bin/maniple run -n 4 --elastic 1:4 build/bin/examples/13_elastic --kill-every 20    kills ranks; same hash
//
// Options:
//   --epochs N  --samples N
//   --kill-every N    one rank kills itself after every N steps; 0 (default): never
//   --log FOLDER      for TensorBoard, and log.jsonl
//   --checkpoints FOLDER
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <string>

#include <torch/torch.h>

#include "arguments.h"
#include <maniple/maniple.h>

namespace {

torch::nn::Sequential make_net() {
  namespace nn = torch::nn;
  return nn::Sequential(nn::Conv2d(1, 16, 5), nn::BatchNorm2d(16), nn::ReLU(), nn::MaxPool2d(4), nn::Flatten(),
                        nn::Dropout(0.2), nn::Linear(16 * 36, 10));
}

/// FNV-1a over all parameters and buffers.
std::uint64_t hash_of(const torch::nn::Sequential& net) {
  std::uint64_t hash = 14695981039346656037U;
  std::vector<torch::Tensor> tensors = net->parameters();
  for (const torch::Tensor& buffer : net->buffers()) tensors.push_back(buffer);
  for (const torch::Tensor& tensor : tensors) {
    const torch::Tensor whole = tensor.detach().contiguous();
    const auto* const bytes = static_cast<const unsigned char*>(whole.data_ptr());
    for (std::size_t i = 0; i < whole.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211U;
  }
  return hash;
}

}  // namespace

int main(int argc, char** argv) {
  std::string log, checkpoints;
  std::size_t epochs = 2, samples = 4000, kill_every = 0;
  read_arguments(argc, argv,
                 {{"--log", &log},
                  {"--checkpoints", &checkpoints},
                  {"--epochs", &epochs},
                  {"--samples", &samples},
                  {"--kill-every", &kill_every}});
  maniple::init_process_group();
  torch::manual_seed(1);
  auto net = make_net();
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(2e-3));
  maniple::DataLoader train(maniple::Mnist::drawn(samples, 1), {.batch_size = 16, .seed = 7});
  maniple::DataLoader test(maniple::Mnist::drawn(500, 2), {.batch_size = 64, .mode = maniple::SamplerMode::evaluation});
  maniple::Trainer* running = nullptr;
  maniple::Trainer trainer(net, optimizer,
                           {.epochs = epochs,
                            .max_grad_norm = 5,
                            .checkpoint = {.folder = checkpoints},
                            .log_every = 10,
                            .log_dir = log,
                            .on_step =
                                [&](const maniple::TrainerState& state) {
                                  const auto step = static_cast<std::size_t>(state.step);
                                  if (kill_every == 0 || step % kill_every != 0) return;
                                  const std::size_t victim = step / kill_every % running->ranks();
                                  if (running->ranks() > 1 && static_cast<int>(victim) == running->rank())
                                    std::raise(SIGKILL);
                                },
                            .virtual_ranks = 4});
  running = &trainer;
  const maniple::TrainerState& end =
      trainer.fit(train, test, [&](auto& batch, maniple::Metrics& metrics) -> torch::Tensor {
        const torch::Tensor scores = net->forward(batch.data);
        metrics.add_accuracy("accuracy", scores, batch.target);
        return torch::nn::functional::cross_entropy(scores, batch.target);
      });
  if (trainer.rank() == 0 && end.end == maniple::TrainerEnd::epochs) {  // a rank that left has no result
    std::printf("%lld steps, %d ranks, accuracy %.4f, weights %016llx\n", static_cast<long long>(end.step),
                trainer.ranks(), end.evaluation.value_or("accuracy", 0), static_cast<unsigned long long>(hash_of(net)));
  }
}
