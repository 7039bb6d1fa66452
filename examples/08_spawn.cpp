// A program that starts its own ranks like torch.multiprocessing.spawn: one process per device of this machine.
//
//   build/bin/examples/08_spawn --nprocs 2                              one machine
//   build/bin/examples/08_spawn --nprocs 4 --nodes 2 --node-rank 0      on the first of two; --node-rank 1 on the
//                                                                       other, both with MASTER_ADDR, MASTER_PORT and
//                                                                       MANIPLE_SECRET_FILE set
//
// Options:
//   --nprocs N  --nodes N  --node-rank N
//   --dist-url URL                 env:// by default; also tcp://host:port or file:///path
//   --epochs N  --seed N
//   --batch-size N, --workers N    of all processes together
//   --resume FOLDER                continue from the checkpoint in it, if any, and save there after each epoch
#include <cstdio>
#include <exception>
#include <optional>
#include <string>

#include <torch/torch.h>

#include "arguments.h"
#include <maniple/launch/spawn.h>
#include <maniple/maniple.h>

namespace {

struct Arguments {
  std::size_t nodes = 1, node_rank = 0, nprocs = 2, epochs = 3, batch_size = 96, workers = 2, seed = 7;
  std::string dist_url = "env://", resume;
};

// Serialise Arguments for the other processes. Types other than numbers and text need these two functions.
void encode(maniple::ArgumentWriter& out, const Arguments& a) {
  for (const auto number : {a.nodes, a.node_rank, a.nprocs, a.epochs, a.batch_size, a.workers, a.seed}) out.put(number);
  out.put(a.dist_url), out.put(a.resume);
}
void decode(maniple::ArgumentReader& in, Arguments& a) {
  for (auto* number : {&a.nodes, &a.node_rank, &a.nprocs, &a.epochs, &a.batch_size, &a.workers, &a.seed})
    in.get(*number);
  in.get(a.dist_url), in.get(a.resume);
}

/// Runs in each process. `device`, 0 to nprocs-1, is this process's device on this machine (LOCAL_RANK).
void main_worker(int device, const Arguments& arguments) {
  const auto world_size = static_cast<int>(arguments.nodes * arguments.nprocs);
  const auto rank = static_cast<int>(arguments.node_rank * arguments.nprocs) + device;
  maniple::InitOptions init;
  init.init_method = arguments.dist_url;
  init.rank = rank;
  init.world_size = world_size;
  maniple::init_process_group(init);
  maniple::seed_all(arguments.seed, static_cast<std::uint64_t>(rank));

  // Divide the job's totals among the processes, so that the job's result does not depend on their number.
  const auto batch_size = maniple::per_process_batch_size(arguments.batch_size, world_size);
  const auto workers = maniple::per_process_workers(arguments.workers, world_size);
  if (rank == 0) {
    std::printf("world size %d = %zu nodes x %zu processes; each: batch size %zu, %zu workers\n", world_size,
                arguments.nodes, arguments.nprocs, batch_size, workers);
  }

  const auto digits = maniple::Mnist::drawn(2000, 1);
  maniple::DistributedSampler sampler(digits.size().value(), {.shuffle = true, .seed = arguments.seed});
  const auto loader =
      torch::data::make_data_loader(maniple::Mnist(digits).map(torch::data::transforms::Stack<>()), sampler,
                                    torch::data::DataLoaderOptions().batch_size(batch_size).workers(workers));

  torch::nn::Sequential net(torch::nn::Flatten(), torch::nn::Linear(784, 32), torch::nn::ReLU(),
                            torch::nn::Linear(32, 10));
  maniple::DistributedDataParallel ddp(net);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));

  std::optional<maniple::Checkpoint> checkpoint;
  if (!arguments.resume.empty()) {
    checkpoint.emplace(maniple::CheckpointOptions{.folder = arguments.resume});
    checkpoint->add("model", *net).add("optimizer", optimizer).add("sampler", sampler);
    // Every process loads the checkpoint to its own device, whichever device it was saved from.
    const auto step = checkpoint->load({.map_location = net->parameters()[0].device()});
    if (step && rank == 0)
      std::printf("resumed from step %d: %s\n", static_cast<int>(*step), sampler.cursor_text().c_str());
  }

  for (std::size_t epoch = sampler.epoch(); epoch < arguments.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    auto sums = torch::zeros({2}, torch::kFloat64);  // loss, samples
    for (auto& batch : sampler.counting(*loader)) {
      optimizer.zero_grad();
      const auto loss = torch::cross_entropy_loss(ddp.forward(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      sums += torch::tensor({loss.item<double>(), 1.0}, torch::kFloat64) * batch.data.size(0);
    }
    maniple::all_reduce(sums);
    const auto samples = sums[1].item<double>();
    if (rank == 0) {
      std::printf("epoch %zu: loss %.4f over %.0f samples\n", epoch + 1, sums[0].item<double>() / samples, samples);
    }
    if (checkpoint) checkpoint->save(static_cast<std::int64_t>(epoch + 1));
  }
  maniple::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) try {
  Arguments a;
  read_arguments(argc, argv,
                 {{"--nodes", &a.nodes},
                  {"--node-rank", &a.node_rank},
                  {"--nprocs", &a.nprocs},
                  {"--seed", &a.seed},
                  {"--epochs", &a.epochs},
                  {"--batch-size", &a.batch_size},
                  {"--workers", &a.workers},
                  {"--dist-url", &a.dist_url},
                  {"--resume", &a.resume}});
  const auto as_int = [](std::size_t number) { return static_cast<int>(number); };
  maniple::spawn(main_worker, {.nprocs = as_int(a.nprocs), .nodes = as_int(a.nodes), .node_rank = as_int(a.node_rank)},
                 a);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());  // names the process that failed first, and its error
  return 1;
}
