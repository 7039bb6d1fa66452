// Data-parallel training with plain tensor operations: send and recv synchronise the parameters, and all_reduce
// averages the gradients after backward. DistributedDataParallel does the same for you, faster (05_ddp_mnist).
//
//   build/bin/maniple run -n 3 build/bin/examples/04_average_gradients
#include <cstdio>
#include <exception>

#include <torch/torch.h>

#include <maniple/maniple.h>

namespace {

/// Sends rank 0's parameters to all other ranks, one by one.
void sync_parameters(torch::nn::Module& model, int rank, int ranks) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model.parameters()) {
    if (rank == 0) {
      for (int sibling = 1; sibling < ranks; ++sibling) maniple::send(parameter, sibling);
    } else {
      maniple::recv(parameter, /*src=*/0);
    }
  }
}

/// Replaces every rank's gradients with their mean over all ranks.
void sync_gradients(torch::nn::Module& model) {
  for (auto& parameter : model.parameters()) maniple::all_reduce(parameter.grad(), maniple::ReduceOp::avg);
}

/// Whether all ranks hold bitwise identical parameters.
bool all_equal(torch::nn::Module& model) {
  const torch::NoGradGuard no_grad;
  bool equal = true;
  for (auto& parameter : model.parameters()) {
    const auto least = parameter.clone();
    const auto most = parameter.clone();
    maniple::all_reduce(least, maniple::ReduceOp::min);
    maniple::all_reduce(most, maniple::ReduceOp::max);
    equal = equal && torch::equal(least, most);
  }
  return equal;
}

}  // namespace

int main() try {
  maniple::init_process_group();
  const int rank = maniple::get_rank();
  const int ranks = maniple::get_world_size();
  maniple::seed_all(7, static_cast<std::uint64_t>(rank));  // each rank starts with different weights

  torch::nn::Sequential model(torch::nn::Linear(8, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  sync_parameters(*model, rank, ranks);
  torch::optim::SGD optimizer(model->parameters(), 0.03);

  // The ranks share one dataset: y is the sum of the squares of x.
  const auto x = torch::rand({600, 8}, torch::make_generator<torch::CPUGeneratorImpl>(1));
  const auto y = x.pow(2).sum(1, true);
  maniple::DistributedSampler sampler(600, {.shuffle = true, .seed = 7});

  double first = 0;
  double loss_mean = 0;
  for (std::size_t epoch = 0; epoch < 30; ++epoch) {
    sampler.set_epoch(epoch);
    sampler.reset();
    auto loss_sum = torch::zeros({1});
    while (const auto batch = sampler.next(20)) {
      const auto rows = torch::tensor(std::vector<std::int64_t>(batch->begin(), batch->end()));
      optimizer.zero_grad();
      const auto loss = torch::mse_loss(model->forward(x.index_select(0, rows)), y.index_select(0, rows));
      loss.backward();
      sync_gradients(*model);
      optimizer.step();
      loss_sum += loss.detach() * static_cast<double>(batch->size());
    }
    maniple::all_reduce(loss_sum);
    loss_mean = loss_sum.item<double>() / static_cast<double>(sampler.local_size()) / ranks;
    if (epoch == 0) first = loss_mean;
    if (rank == 0 && epoch % 10 == 9) std::printf("epoch %2zu  loss %.4f\n", epoch + 1, loss_mean);
  }

  const bool equal = all_equal(*model);
  if (rank == 0) std::printf("all %d ranks hold the same weights: %s\n", ranks, equal ? "yes" : "no");
  return equal && loss_mean < first / 4 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
