// The first program of many a text on torch.distributed, line for line: a tensor goes from rank 0 to rank 1, over MPI.
//
//   import torch
//   import torch.distributed as dist
//   def main(rank, world):
//       if rank == 0:
//           x = torch.tensor([1., -1.])
//           dist.send(x, dst=1)
//           print('Rank-0 has sent the following tensor to Rank-1')
//           print(x)
//       else:
//           z = torch.tensor([0., 0.])
//           dist.recv(z, src=0)
//           print('Rank-1 has recieved the following tensor from Rank-0')
//           print(z)
//
//   if __name__ == '__main__':
//       dist.init_process_group(backend='mpi')
//       main(dist.get_rank(), dist.get_world_size())
#include <iostream>

#include <maniple/maniple.h>

namespace dist = maniple;

static void run(int rank, int /*world*/) {
  if (rank == 0) {
    auto x = torch::tensor({1., -1.});  // the tensor of interest
    dist::send(x, /*dst=*/1);
    std::cout << "Rank-0 has sent the following tensor to Rank-1\n";
    std::cout << x << '\n';
  } else {
    auto z = torch::tensor({0., 0.});  // a holder for the tensor that comes
    dist::recv(z, /*src=*/0);
    std::cout << "Rank-1 has received the following tensor from Rank-0\n";
    std::cout << z << '\n';
  }
}

int main() try {
  dist::init_process_group({.backend = "mpi"});
  run(dist::get_rank(), dist::get_world_size());
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
