// A training for the tests of stopping: stop_worker FOLDER STEPS [HOLD_AT]
//
// Goes on from the checkpoint in the folder if there is one, ends after STEPS steps with the hash of its weights, or
// when a stop is requested, with a checkpoint. At step HOLD_AT rank 0 waits until a signal has arrived, so that it
// arrives in the middle.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>

#include <torch/torch.h>

#include <maniple/maniple.h>

namespace {

std::uint64_t hash_of(const torch::nn::Module& module) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const auto& tensor : module.parameters()) {
    const auto flat = tensor.detach().contiguous();
    const auto* bytes = static_cast<const unsigned char*>(flat.data_ptr());
    for (std::size_t i = 0; i < flat.nbytes(); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
  }
  return hash;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3) return 2;
  const std::int64_t steps = std::atol(argv[2]);
  const std::int64_t hold_at = argc > 3 ? std::atol(argv[3]) : -1;
  torch::set_num_threads(1);
  maniple::init_process_group();
  const int rank = maniple::get_rank();
  maniple::seed_all(7, static_cast<std::uint64_t>(rank));
  torch::nn::Sequential net(torch::nn::Linear(4, 16), torch::nn::ReLU(), torch::nn::Dropout(0.3),
                            torch::nn::Linear(16, 1));
  maniple::DistributedDataParallel ddp(net);
  torch::optim::Adam optimizer(net->parameters(), 0.01);
  maniple::Checkpoint checkpoint({.folder = argv[1]});
  checkpoint.add("model", *net).add("optimizer", optimizer);
  std::int64_t step = checkpoint.load().value_or(0);
  std::printf("from %ld\n", static_cast<long>(step));
  maniple::GracefulStop stop;
  while (step < steps) {
    if (step == hold_at && rank == 0) {
      std::printf("holding\n");
      std::fflush(stdout);
      // sleep: between two polls
      while (!stop.requested()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const auto x = torch::randn({8, 4});
    optimizer.zero_grad();
    (ddp.forward(x) - x.sum(1, true)).pow(2).mean().backward();
    optimizer.step();
    ++step;
    if (stop.requested_anywhere()) {
      checkpoint.save(step);
      checkpoint.wait();
      std::printf("stopped at %ld by %d\n", static_cast<long>(step), stop.signal());
      return checkpoint.last_error().empty() ? 0 : 1;
    }
  }
  std::printf("weights %016lx\n", static_cast<unsigned long>(hash_of(*net)));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
