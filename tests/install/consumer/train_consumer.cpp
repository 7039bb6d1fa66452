// A user's program: two ranks with a rendezvous in a file take one step of training.
#include <cstdio>
#include <cstdlib>

#include <maniple/maniple.h>

int main(int, char** arguments) {
  maniple::InitOptions options;
  options.init_method = arguments[1];
  options.world_size = std::atoi(std::getenv("WORLD_SIZE"));
  options.init_timeout = std::chrono::seconds(60);
  maniple::init_process_group(options);
  torch::nn::Linear net(3, 1);
  maniple::DistributedDataParallel ddp(net);
  ddp->forward(torch::full({1, 3}, maniple::get_rank() + 1.0f)).sum().backward();
  const float gradient = net->weight.grad()[0][0].item<float>();
  std::printf("rank %d of %d: %g\n", maniple::get_rank(), maniple::get_world_size(), gradient);
  const float expected = static_cast<float>(maniple::get_world_size() + 1) / 2;
  maniple::barrier();
  maniple::destroy_process_group();
  return gradient == expected ? 0 : 1;
}
