// ShardedOptimizer on several hosts: with shared_parameters one rank of each exchanges what the others have stepped.
#include "harness/run_ranks.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::sharded_hosts_test {
namespace {

TEST(ShardedHosts, ParametersEqualThePlainOptimizersParameters) {
  for (const bool shared : {true, false}) {
    run_ranks({.n = 5, .as = As::netns, .limit = std::chrono::seconds(180), .hosts = 2}, [shared](Rank& r) {
      std::vector<torch::Tensor> plain, parameters;
      for (int i = 0; i < 4; ++i) {
        plain.push_back(numbers({300 + 71 * i}, i).requires_grad_());
        parameters.push_back((numbers({300 + 71 * i}, i) + r.rank).detach().requires_grad_());  // rank 0's are taken
      }
      optim::AdamW reference(plain, 0.01);
      ShardedOptimizer<optim::AdamW> optimizer(parameters, 0.01, {r.world, shared});
      for (int step = 0; step < 5; ++step) {
        for (std::size_t i = 0; i < plain.size(); ++i)
          plain[i].mutable_grad() = parameters[i].mutable_grad() =
              numbers(plain[i].sizes(), step * 10 + static_cast<int>(i));
        reference.step(), optimizer.step();
        for (std::size_t i = 0; i < plain.size(); ++i)
          EXPECT_TRUE(torch::equal(parameters[i].detach(), plain[i].detach())) << step << ", " << i;
        r.world->barrier();
      }
    });
  }
}

}  // namespace
}  // namespace maniple::harness::sharded_hosts_test
