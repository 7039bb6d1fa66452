// Sends a tensor from rank 0 to rank 1, the classic first program of torch.distributed.
//
//   build/bin/maniple run -n 2 build/bin/examples/02_send_recv
#include <cstdio>
#include <exception>
#include <iostream>

#include <torch/torch.h>

#include <maniple/maniple.h>

namespace {

int run(int rank, int ranks) {
  if (ranks < 2) {
    std::fprintf(stderr, "this program needs two ranks: maniple run -n 2 ...\n");
    return 2;
  }
  if (rank == 0) {
    const auto x = torch::tensor({1.F, -1.F});  // the tensor of interest
    maniple::send(x, /*dst=*/1);
    std::cout << "rank 0 has sent this tensor to rank 1:\n" << x << std::endl;
  } else if (rank == 1) {
    const auto z = torch::zeros({2});  // room for what comes
    const int sender = maniple::recv(z, /*src=*/0);
    std::cout << "rank 1 has received this tensor from rank " << sender << ":\n" << z << std::endl;
    if (!torch::equal(z, torch::tensor({1.F, -1.F}))) return 1;
  }

  // Each rank sends its number to the right and receives from the left. In one batch this cannot deadlock.
  const auto own = torch::full({1}, rank);
  const auto left = torch::full({1}, -1);
  const int from = (rank + ranks - 1) % ranks;
  for (const auto& work : maniple::batch_isend_irecv(
           {maniple::P2POp::isend(own, (rank + 1) % ranks), maniple::P2POp::irecv(left, from)})) {
    work.wait();
  }
  return left.item<int>() == from ? 0 : 1;
}

}  // namespace

int main() try {
  maniple::init_process_group();
  return run(maniple::get_rank(), maniple::get_world_size());
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
