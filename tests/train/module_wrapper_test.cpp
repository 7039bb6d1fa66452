// DistributedDataParallel and DataParallel where a torch::nn::Module is expected.
#include <sstream>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/data_parallel/data_parallel_models.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::module_wrapper_test {
namespace {

std::vector<std::string> names_in(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) names.push_back(item.key());
  return names;
}

/// What holds for both: `wrapper` wraps `net`, which has a batch norm.
template <class Wrapper>
void expect_module(const std::shared_ptr<Wrapper>& wrapper, TwinImpl& net) {
  torch::nn::Module& module = *wrapper;
  EXPECT_EQ(names_in(module), (std::vector<std::string>{"module.fc1.weight", "module.fc1.bias", "module.fc2.weight",
                                                        "module.fc2.bias", "module.norm.weight", "module.norm.bias"}));
  ASSERT_EQ(module.parameters().size(), net.parameters().size());
  EXPECT_TRUE(module.parameters()[0].is_same(net.fc1->weight));
  EXPECT_EQ(module.named_buffers().size(), 3u);
  EXPECT_EQ(module.children().size(), 1u);

  module.eval();
  EXPECT_FALSE(net.is_training() || net.norm->is_training() || module.is_training());
  module.train();
  EXPECT_TRUE(net.is_training() && net.norm->is_training() && module.is_training());
  net.eval();
  EXPECT_FALSE(module.is_training()) << "the wrapped module says";
  net.train();

  loss_of((*wrapper)(numbers({4, 8}))).backward();
  loss_of(wrapper->forward(numbers({4, 8}))).backward();
  EXPECT_GT(net.fc1->weight.grad().abs().sum().item<double>(), 0);
  module.zero_grad();
  const torch::Tensor& gradient = net.fc1->weight.grad();
  EXPECT_TRUE(!gradient.defined() || gradient.abs().sum().item<double>() == 0);

  // To a file and back, through the wrapper.
  std::stringstream file;
  torch::save(wrapper, file);
  const Gradients before = {{"weight", net.fc1->weight.detach().clone()}, {"mean", net.norm->running_mean.clone()}};
  fill(net, 9);
  net.norm->running_mean.zero_();
  auto loaded = wrapper;
  torch::load(loaded, file);
  EXPECT_TRUE(torch::equal(net.fc1->weight, before.at("weight")));
  EXPECT_TRUE(torch::equal(net.norm->running_mean, before.at("mean")));
  loss_of((*wrapper)(numbers({4, 8}))).backward();  // hooks and replicas are still right

  module.to(torch::kCPU);
  module.to(torch::kFloat32);
  module.to(torch::kCPU, torch::kFloat32);
  for (const auto& convert : std::vector<std::function<void()>>{[&] { module.to(torch::kFloat64); },
                                                                [&] { module.to(torch::kCPU, torch::kFloat64); },
                                                                [&] { module.to(torch::kMeta); }}) {
    const Caught caught = catch_error(convert);
    EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
    EXPECT_TRUE(contains(caught.text, "convert the module first and wrap it then")) << caught;
  }
  EXPECT_EQ(net.fc1->weight.scalar_type(), torch::kFloat32);

  std::ostringstream text;
  text << module;
  EXPECT_TRUE(contains(text.str(), "(module): ")) << text.str();
}

TEST(ModuleWrapper, DistributedDataParallelIsAModule) {
  run_ranks({.n = 2}, [](Rank& r) {
    Twin net(true);
    const auto ddp = std::make_shared<DistributedDataParallel<Twin>>(net, DdpOptions{.group = r.world});
    expect_module(ddp, *net);
    expect_same_everywhere(r, *ddp);
    // As a part of another module.
    struct Outer : torch::nn::Module {};
    Outer outer;
    outer.register_module("ddp", ddp);
    EXPECT_EQ(names_in(outer).front(), "ddp.module.fc1.weight");
  });
}

TEST(ModuleWrapper, DataParallelIsAModule) {
  Twin net(true);
  expect_module(std::make_shared<DataParallel<Twin>>(net, DataParallelOptions{.devices = cpus(2)}), *net);
}

TEST(ModuleWrapper, AnOptimizerTakesTheWrappersParameters) {
  run_ranks({.n = 2}, [](Rank& r) {
    Twin net;
    DistributedDataParallel ddp(net, {.group = r.world});
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    const torch::Tensor before = net->fc1->weight.detach().clone();
    loss_of(ddp(numbers({4, 8}, r.rank))).backward();
    optimizer.step();
    EXPECT_FALSE(torch::equal(before, net->fc1->weight));
    expect_same_everywhere(r, *net, false);
  });
}

TEST(ModuleWrapper, ErrorsOfReplicasAreErrors) {
  Scripted net([](ScriptedImpl&, const torch::Tensor& x) -> torch::Tensor {
    if (x[0].item<float>() > 0) throw Unsupported("not today");
    throw std::runtime_error("a plain one");
  });
  const DataParallel dp(net, {.devices = cpus(2)});
  const Caught own = catch_error([&] { dp(torch::ones({2})); });
  EXPECT_TRUE(own.is(ErrorKind::unsupported) && contains(own.text, "not today")) << own;
  const Caught plain = catch_error([&] { dp(torch::zeros({2})); });
  EXPECT_TRUE(plain.is(ErrorKind::aborted) && contains(plain.text, "a plain one")) << plain;
}

}  // namespace
}  // namespace maniple::harness::module_wrapper_test
