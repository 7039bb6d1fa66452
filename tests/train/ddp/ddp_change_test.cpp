// A module that changes after it was wrapped: training without averaging never goes unnoticed.
#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::ddp_change_test {
namespace {

using Change = std::function<void(NetImpl&)>;

/// Wraps, trains a step, changes the module on some ranks and uses it through itself: the error of each rank.
void expect_error_after(const Change& change, const std::string& text, std::function<bool(int)> changes,
                        bool find_unused, bool forward_restores = false) {
  run_ranks({.n = 2}, [&](Rank& r) {
    auto net = std::make_shared<NetImpl>();
    net->fc1->bias.requires_grad_(false);
    DistributedDataParallel<NetImpl> ddp(net, {.find_unused_parameters = find_unused, .group = r.world});
    loss_of(net->forward(numbers({4, 8}, r.rank))).backward();
    r.world->barrier();
    if (changes(r.rank)) change(*net);
    const Caught caught = catch_error([&] {
      net->zero_grad(true);
      loss_of(net->forward(numbers({4, 8}, r.rank).to(net->fc1->weight.scalar_type()))).backward();
      r.world->barrier();
    });
    EXPECT_TRUE(caught.is_one_of({ErrorKind::invalid_argument, ErrorKind::aborted})) << caught;
    EXPECT_TRUE(contains(caught.text, text)) << caught;
    EXPECT_TRUE(contains(caught.text, "first and wrap it then")) << caught;
    if (!changes(r.rank)) return;
    const Caught through = catch_error([&] { ddp(numbers({4, 8})); });
    if (forward_restores) {
      EXPECT_FALSE(through.any) << through;
      return;
    }
    EXPECT_TRUE(through.is(ErrorKind::invalid_argument) && contains(through.text, text)) << through;
  });
}

const auto kAll = [](int) { return true; };
const auto kOne = [](int rank) { return rank == 1; };

TEST(DdpChange, AConvertedModuleThatIsUsedThroughItself) {
  const auto to_double = [](NetImpl& net) { net.to(torch::kFloat64); };
  const auto there_and_back = [](NetImpl& net) {
    net.to(torch::kFloat64);
    net.to(torch::kFloat32);
  };
  for (const bool find_unused : {false, true}) {
    expect_error_after(to_double, "was converted from Float to Double", kAll, find_unused);
    expect_error_after(to_double, "was converted from Float to Double", kOne, find_unused);
    expect_error_after(there_and_back, "fc2.bias got other memory after it was wrapped", kAll, find_unused, true);
  }
}

TEST(DdpChange, AParameterThatIsAddedReplacedOrNoLongerFrozen) {
  const Change replace = [](NetImpl& net) {
    net.fc2 = net.replace_module("fc2", torch::nn::Linear(16, 4));
    net.to(training_device());
  };
  const Change add = [](NetImpl& net) { net.register_parameter("scale", torch::ones({1}, training_device())); };
  const Change thaw = [](NetImpl& net) { net.fc1->bias.requires_grad_(true); };
  for (const bool find_unused : {false, true}) {
    expect_error_after(replace, "parameter fc2.weight requires a gradient and was not there", kAll, find_unused);
    expect_error_after(add, "parameter scale requires a gradient and was not there", kOne, find_unused);
    expect_error_after(thaw, "parameter fc1.bias requires a gradient and was not there, or required none", kAll,
                       find_unused);
  }
}

// Under no_sync as well: what it would add up is never averaged.
TEST(DdpChange, AConvertedModuleUnderNoSync) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
    net->to(torch::kFloat64);
    const auto guard = ddp.no_sync();
    const Caught caught =
        catch_error([&] { loss_of(net->forward(numbers({4, 8}, r.rank).to(torch::kFloat64))).backward(); });
    EXPECT_TRUE(caught.any && contains(caught.text, "was converted")) << caught;
  });
}

// Once the wrapper is gone the module is the user's again.
TEST(DdpChange, AModuleThatIsNoLongerWrapped) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto net = std::make_shared<NetImpl>();
    {
      const DistributedDataParallel<NetImpl> ddp(net, {.group = r.world});
    }
    net->to(torch::kFloat64);
    EXPECT_NO_THROW(loss_of(net->forward(numbers({4, 8}, r.rank).to(torch::kFloat64))).backward());
    net->zero_grad(true);
    DistributedDataParallel<NetImpl> again(net, {.group = r.world});
    loss_of(net->forward(numbers({4, 8}, r.rank).to(torch::kFloat64))).backward();
    expect_same_everywhere(r, *net);
  });
}

// A gradient that the program puts into other memory while backward is under way is averaged all the same.
TEST(DdpChange, AGradientInOtherMemory) {
  run_ranks({.n = 2}, [](Rank& r) {
    auto net = std::make_shared<NetImpl>();
    DistributedDataParallel<NetImpl> ddp(net, {.group = r.world, .overlap = Overlap::none});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const torch::Tensor hidden = net->fc1->forward(numbers({4, 8}, r.rank));
      hidden.register_hook(
          [&](const torch::Tensor&) { net->fc2->weight.mutable_grad() = net->fc2->weight.grad().clone(); });
      loss_of(net->fc2->forward(hidden)).backward();
      expect_same_everywhere(r, *net);
    }
  });
}

// An unused parameter keeps the gradient that the program set, in whatever memory.
TEST(DdpChange, AGradientThatTheProgramSet) {
  for (const bool views : {true, false}) {
    run_ranks({.n = 2}, [views](Rank& r) {
      auto net = std::make_shared<NetImpl>();
      DistributedDataParallel<NetImpl> ddp(
          net, {.find_unused_parameters = true, .gradient_as_bucket_view = views, .group = r.world});
      for (int step = 0; step < 2; ++step) {
        net->fc2->weight.mutable_grad() = torch::full_like(net->fc2->weight, r.rank + 1);
        loss_of(net->fc1->forward(numbers({4, 8}, r.rank))).backward();
        EXPECT_TRUE(torch::all(net->fc2->weight.grad() == r.rank + 1).item<bool>()) << net->fc2->weight.grad();
      }
    });
  }
}

}  // namespace
}  // namespace maniple::harness::ddp_change_test
