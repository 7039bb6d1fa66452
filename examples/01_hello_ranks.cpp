// The smallest program: every rank initialises the process group, prints its rank, and adds its number to the others'.
//
//   build/bin/maniple run -n 3 build/bin/examples/01_hello_ranks
#include <cstdio>
#include <exception>

#include <torch/torch.h>

#include <maniple/maniple.h>

int main() try {
  maniple::init_process_group();  // env://: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, which the launcher sets
  const int rank = maniple::get_rank();
  const int ranks = maniple::get_world_size();

  for (int turn = 0; turn < ranks; ++turn) {
    if (turn == rank) {
      std::printf("hello from rank %d of %d, backend %s\n", rank, ranks, maniple::get_backend().c_str());
      std::fflush(stdout);
    }
    maniple::barrier();
  }

  const auto sum = torch::full({1}, rank + 1);
  maniple::all_reduce(sum);
  if (rank == 0) std::printf("1 + ... + %d = %d\n", ranks, sum.item<int>());
  const bool right = sum.item<int>() == ranks * (ranks + 1) / 2;

  maniple::destroy_process_group();
  return right ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
