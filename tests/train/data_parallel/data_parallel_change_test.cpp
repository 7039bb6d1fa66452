// DataParallel when the module changes, and when something is wrong.
#include "fault/expect_error.h"
#include "train/data_parallel/data_parallel_models.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::data_parallel_change_test {
namespace {

using torch::Tensor;

// ---- The module changes -----------------------------------------------------------------------------------------

TEST(DataParallel, ReplicasFollowTheModule) {
  Twin net;
  fill(*net, 1);
  for (const bool share : {true, false}) {
    net->to(torch::kFloat32);
    const DataParallel dp(net, {.devices = cpus(2), .share_parameters = share});
    const auto agrees = [&](torch::ScalarType dtype) {
      const Tensor x = numbers({4, 8}).to(dtype);
      return torch::allclose(dp.forward(x), net->forward(x), 1e-5, 1e-6);
    };
    EXPECT_TRUE(agrees(torch::kFloat32));
    fill(*net, 5);
    EXPECT_TRUE(agrees(torch::kFloat32));
    net->to(torch::kFloat64);
    EXPECT_TRUE(agrees(torch::kFloat64));
    net->fc1->weight.set_requires_grad(false);
    net->zero_grad(true);
    loss_of(dp.forward(numbers({4, 8}).to(torch::kFloat64))).backward();
    EXPECT_FALSE(net->fc1->weight.grad().defined());
    EXPECT_TRUE(net->fc2->weight.grad().defined());
    net->fc1->weight.set_requires_grad(true);
    loss_of(dp.forward(numbers({4, 8}).to(torch::kFloat64))).backward();
    EXPECT_TRUE(net->fc1->weight.grad().defined());
  }
}

TEST(DataParallel, BuffersComeFromTheFirstReplica) {
  Twin net(true), first(true);
  fill(*net, 1);
  fill(*first, 1);
  DataParallel dp(net, {.devices = cpus(2)});
  for (int step = 0; step < 3; ++step) {
    const Tensor x = numbers({6, 8}, step);
    dp.forward(x);
    first->forward(x.narrow(0, 0, 3));
    EXPECT_TRUE(torch::allclose(net->norm->running_mean, first->norm->running_mean));
    EXPECT_TRUE(torch::allclose(net->norm->running_var, first->norm->running_var));
    EXPECT_EQ(net->norm->num_batches_tracked.item<int>(), step + 1);
  }
  dp->eval();
  const Tensor x = numbers({6, 8}, 7);
  EXPECT_TRUE(torch::allclose(dp.forward(x), net->forward(x), 1e-5, 1e-6));
}

struct Outer : torch::nn::Cloneable<Outer> {  // its child cannot be cloned, but is made anew
  Outer() { reset(); }
  void reset() override { child = register_module("child", std::make_shared<NetImpl>()); }
  Tensor forward(Tensor x) { return child->forward(x); }
  std::shared_ptr<NetImpl> child;
};

TEST(DataParallel, SequentialsWithNamesAndFactories) {
  torch::nn::Sequential net(
      {{"first", torch::nn::Linear(8, 8)}, {"second", torch::nn::ReLU()}, {"third", torch::nn::Linear(8, 2)}});
  const DataParallel dp(net, {.devices = cpus(2)});
  const Tensor x = numbers({5, 8});
  EXPECT_TRUE(torch::allclose(dp->forward(x), net->forward(x), 1e-5, 1e-6));

  auto plain = std::make_shared<NetImpl>(12);  // cannot be cloned
  const DataParallel made(plain, {.devices = cpus(2)}, [] { return std::make_shared<NetImpl>(12); });
  EXPECT_TRUE(torch::allclose(made->forward(x), plain->forward(x), 1e-5, 1e-6));
  const DataParallel<Net> held(Net(plain), {.devices = cpus(3)}, [] { return Net(12); });
  EXPECT_TRUE(torch::allclose(held->forward(x), plain->forward(x), 1e-5, 1e-6));
  EXPECT_EQ(held.module(), plain);

  auto outer = std::make_shared<Outer>();
  const DataParallel parent(outer, {.devices = cpus(2)});
  EXPECT_TRUE(torch::allclose(parent->forward(x), outer->forward(x), 1e-5, 1e-6));
  static_assert(!detail::kCloneable<NetImpl> && detail::kCloneable<TwinImpl> &&
                detail::kCloneable<torch::nn::LinearImpl>);
}

// ---- Errors -----------------------------------------------------------------------------------------------------

template <class Call>
std::string invalid(Call call) {
  const Caught caught = catch_error(call);
  EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
  return caught.text;
}

TEST(DataParallel, BadDevices) {
  Twin net;
  const auto with = [&](DataParallelOptions options) { return [&net, options] { DataParallel dp(net, options); }; };
  EXPECT_TRUE(contains(invalid(with({})), "no devices"));
  EXPECT_TRUE(
      contains(invalid(with({.devices = {torch::kCPU, torch::Device(torch::kCPU, 1)}})), "devices[1] is cpu:1"));
  if (!torch::cuda::is_available()) {
    EXPECT_TRUE(contains(invalid(with({.devices = {torch::kCPU, torch::Device("cuda:0")}})), "finds no CUDA device"));
    EXPECT_TRUE(
        contains(invalid(with({.devices = cpus(2), .output_device = torch::Device("cuda:0")})), "output_device"));
  }
  EXPECT_TRUE(contains(invalid(with({.devices = cpus(2), .threads = -1})), "-1 threads"));
  const Caught meta = catch_error(with({.devices = {torch::kMeta}}));
  EXPECT_TRUE(meta.is(ErrorKind::unsupported)) << meta;
  EXPECT_TRUE(
      contains(invalid([] { DataParallel<TwinImpl> dp(std::shared_ptr<TwinImpl>(), {.devices = cpus(2)}); }), "null"));
}

TEST(DataParallel, BadModulesAndFactories) {
  torch::nn::Sequential sequential(std::make_shared<NetImpl>());
  EXPECT_TRUE(contains(invalid([&] { DataParallel dp(sequential, {.devices = cpus(2)}); }), "cannot be cloned"));
  const auto net = std::make_shared<NetImpl>();
  const auto made_by = [&](auto make) { return [&net, make] { DataParallel dp(net, {.devices = cpus(2)}, make); }; };
  EXPECT_TRUE(contains(invalid(made_by([] { return std::make_shared<NetImpl>(17); })), "fc1.weight is Float [16, 8]"));
  EXPECT_TRUE(contains(invalid(made_by([] { return std::make_shared<NetImpl>(16, true); })), "modules"));
  EXPECT_TRUE(contains(invalid(made_by([&] { return net; })), "the module itself"));
  EXPECT_TRUE(contains(invalid(made_by([] { return std::shared_ptr<NetImpl>(); })), "null"));
}

TEST(DataParallel, BadArguments) {
  Nested net;
  const DataParallel dp(net, {.devices = cpus(2)});
  const auto call = [&](const Tensor& x, const Tensor& mask) {
    return [&dp, x, mask] { dp.forward(x, std::pair(x, std::vector{x}), 1.0, mask, std::optional<Tensor>()); };
  };
  EXPECT_TRUE(contains(invalid(call(numbers({4, 8}), numbers({3, 1}))), "tensor 3 has 3"));
  EXPECT_TRUE(contains(invalid(call(numbers({4, 8}), torch::tensor(1.0))), "no dimensions"));
  Scripted flat([](ScriptedImpl&, const Tensor& x) { return x; });
  const DataParallel along(flat, {.devices = cpus(2), .dim = 2});
  EXPECT_TRUE(contains(invalid([&] { along.forward(numbers({4, 8})); }), "no dimension 2"));
  Scripted odd([](ScriptedImpl&, const Tensor& x) { return torch::zeros({x.size(0), x.size(0)}); });
  const DataParallel uneven(odd, {.devices = cpus(2)});
  EXPECT_TRUE(contains(invalid([&] { uneven.forward(numbers({3, 1})); }),
                       "result 0 is [2, 2] on replica 0 and [1, 1] on replica 1"));
}

struct MyError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

TEST(DataParallel, ReplicasThatThrow) {
  const auto where = std::make_shared<std::string>("forward");
  Scripted net([=](ScriptedImpl& self, const Tensor& x) {
    const bool last = x[0].item<double>() == 2;
    if (last && *where == "forward") throw MyError("no bananas");
    const Tensor y = x * self.weight;
    if (torch::GradMode::is_enabled()) {
      y.register_hook([=](const Tensor&) {
        if (last && *where == "backward") throw MyError("no bananas");
      });
    }
    return y;
  });
  const DataParallel dp(net, {.devices = cpus(3)});
  const Tensor x = torch::arange(3, torch::kFloat32);
  for (const std::string place : {"forward", "backward"}) {
    *where = place;
    try {
      dp.forward(x).sum().backward();
      FAIL() << "nothing was thrown in " << place;
    } catch (const ReplicaError& error) {
      EXPECT_EQ(error.replica(), 2u);
      EXPECT_EQ(error.device(), torch::Device(torch::kCPU));
      EXPECT_EQ(std::string(error.what()), "DataParallel: replica 2 of 3, on cpu, failed in " + place + ": no bananas");
      EXPECT_THROW(std::rethrow_if_nested(error), MyError);
    }
    *where = "";
    net->zero_grad();
    dp.forward(x).sum().backward();  // nothing is left of it
    EXPECT_EQ(net->weight.grad().item<double>(), 3);
  }
  Twin twin;
  const DataParallel wrong(twin, {.devices = cpus(2)});
  EXPECT_THROW(wrong.forward(numbers({4, 7})), ReplicaError);
}

TEST(DataParallel, GraphsAreKeptOrFreed) {
  Twin net;
  fill(*net, 2);
  const DataParallel dp(net, {.devices = cpus(2)});
  const Tensor loss = loss_of(dp.forward(numbers({4, 8})));
  loss.backward({}, /*retain_graph=*/true);
  const Gradients once = gradients_of(*net);
  net->zero_grad();
  loss.backward();
  expect_identical(gradients_of(*net), once);
  EXPECT_ANY_THROW(loss.backward());
  const Caught twice = catch_error([&] {
    torch::autograd::grad({loss_of(dp.forward(numbers({4, 8})))}, {net->fc1->weight}, {}, true, /*create_graph=*/true);
  });
  EXPECT_TRUE(twice.is(ErrorKind::unsupported)) << twice;
}

TEST(DataParallel, AReplicaMustNotCallItsOwnDataParallel) {
  const DataParallel<Scripted>* self = nullptr;
  Scripted net([&](ScriptedImpl&, const Tensor& x) { return self->forward(x); });
  const DataParallel dp(net, {.devices = cpus(2)});
  self = &dp;
  EXPECT_THROW(dp.forward(numbers({4, 1})), ReplicaError);
}

TEST(DataParallel, SynchronisedBatchNormIsRefused) {
  Twin converted(true);
  convert_sync_batchnorm(converted);
  Caught caught = catch_error([&] { DataParallel dp(converted, {.devices = cpus(2)}); });
  EXPECT_TRUE(caught.is(ErrorKind::unsupported) && contains(caught.text, "norm is synchronised")) << caught;
  torch::nn::Sequential sequential(torch::nn::Linear(2, 2), nn::SyncBatchNorm(2));
  caught = catch_error([&] { DataParallel dp(sequential, {.devices = cpus(2)}); });
  EXPECT_TRUE(caught.is(ErrorKind::unsupported) && contains(caught.text, "1 is synchronised")) << caught;
}

}  // namespace
}  // namespace maniple::harness::data_parallel_change_test
