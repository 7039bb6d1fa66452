// DistributedDataParallel for what is not a torch::nn::Module: scripted models, and lists of tensors.
#include <torch/script.h>

#include <algorithm>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::ddp_tensors_test {
namespace {

using torch::Tensor;

/// The network of models.h as a script: two layers, here with a running mean that forward assigns anew, as scripts of
/// old batch norms do with their counter.
torch::jit::Module scripted(const NetImpl& net) {
  torch::jit::Module module("Net");
  for (const auto& item : net.named_parameters()) {
    std::string name = item.key();
    std::replace(name.begin(), name.end(), '.', '_');
    module.register_parameter(name, item.value().detach().clone().set_requires_grad(true), false);
  }
  module.register_buffer("mean", torch::zeros({8}, training_device()));
  module.register_buffer("count",
                         torch::zeros({}, torch::TensorOptions().dtype(torch::kInt64).device(training_device())));
  module.register_attribute("training", c10::BoolType::get(), true);
  module.define(R"(
    def forward(self, x):
      if self.training:
        self.mean = self.mean * 0.5 + x.detach().mean(0) * 0.5
        self.count.add_(1)
      x = torch.tanh(torch.addmm(self.fc1_bias, x, self.fc1_weight.t()))
      return torch.addmm(self.fc2_bias, x, self.fc2_weight.t())
  )");
  return module;
}

/// Through a file, as a model that comes from Python.
torch::jit::Module reloaded(const torch::jit::Module& module, const std::string& path) {
  module.save(path);
  return torch::jit::load(path, training_device());
}

Gradients gradients_of_script(const torch::jit::Module& module) {
  Gradients result;
  for (const auto& item : module.named_parameters()) {
    std::string name = item.name;
    std::replace(name.begin(), name.end(), '_', '.');
    result[name] = item.value.grad().defined() ? item.value.grad().clone() : Tensor();
  }
  return result;
}

Tensor buffer_of_script(const torch::jit::Module& module, const char* name) { return module.attr(name).toTensor(); }

void expect_same_on_all(Rank& r, const Tensor& tensor) {
  Tensor root = tensor.clone();
  broadcast(root, 0, {.group = r.world});
  EXPECT_TRUE(torch::equal(tensor, root));
}

TEST(DdpScript, TrainsLossByLossAsTheModuleDoes) {
  for (const int n : {1, 2, 3}) {
    run_ranks({.n = n}, [](Rank& r) {
      NetImpl whole, other;
      fill(whole, 3);
      fill(other, 3 + r.rank);  // only rank 0's survive
      DistributedDataParallel ddp(reloaded(scripted(other), r.dir() + "/net" + std::to_string(r.rank) + ".pt"),
                                  {.bucket_cap_mb = kTiny, .group = r.world, .overlap = Overlap::inline_});
      torch::optim::SGD whole_optimizer(whole.parameters(), 0.1), optimizer(ddp.parameters(), 0.1);
      Tensor mean = torch::zeros({8}, training_device());
      for (int step = 0; step < 6; ++step) {
        const Tensor batch = numbers({12, 8}, step);
        const Tensor own = shard(batch, r.rank, r.size);
        whole_optimizer.zero_grad();
        optimizer.zero_grad();
        const Tensor whole_loss = loss_of(whole.forward(batch));
        Tensor loss = loss_of(ddp(own).toTensor());
        whole_loss.backward();
        loss.backward();
        expect_close(gradients_of_script(ddp.module()), gradients_of(whole), 1e-5);
        loss = loss.detach().clone();
        all_reduce(loss, ReduceOp::avg, {.group = r.world});
        EXPECT_NEAR(loss.item<double>(), whole_loss.item<double>(), 1e-5);
        // Rank 0's, although forward has put another tensor in its place.
        mean = mean * 0.5 + shard(batch, 0, r.size).mean(0) * 0.5;
        EXPECT_TRUE(torch::allclose(buffer_of_script(ddp.module(), "mean"), mean, 1e-5, 1e-6));
        expect_same_on_all(r, buffer_of_script(ddp.module(), "mean"));
        EXPECT_EQ(buffer_of_script(ddp.module(), "count").item<int>(), step + 1);
        whole_optimizer.step();
        optimizer.step();
      }
      for (const Tensor& parameter : ddp.parameters()) expect_same_on_all(r, parameter.detach());
      EXPECT_EQ(ddp.statistics().backwards, 6u);

      ddp.eval();
      const torch::NoGradGuard no_grad;
      const Tensor x = numbers({4, 8});
      EXPECT_TRUE(torch::allclose(ddp.forward({x}).toTensor(), whole.forward(x), 1e-4, 1e-5));
      EXPECT_EQ(buffer_of_script(ddp.module(), "count").item<int>(), 6);
    });
  }
}

TEST(DdpScript, GoesOnFromACheckpoint) {
  run_ranks({.n = 2}, [](Rank& r) {
    const auto train = [&](DistributedDataParallel<torch::jit::Module>& ddp, torch::optim::Optimizer& optimizer,
                           int from, int to) {
      for (int step = from; step < to; ++step) {
        optimizer.zero_grad();
        loss_of(ddp(shard(numbers({12, 8}, step), r.rank, r.size)).toTensor()).backward();
        optimizer.step();
      }
    };
    const auto options = torch::optim::SGDOptions(0.05).momentum(0.9);
    NetImpl net;
    fill(net, 3);
    auto straight = scripted(net), first = scripted(net), second = scripted(net);
    DistributedDataParallel ddp(straight, {.group = r.world});
    torch::optim::SGD optimizer(ddp.parameters(), options);
    train(ddp, optimizer, 0, 6);
    {
      DistributedDataParallel half(first, {.group = r.world});
      torch::optim::SGD half_optimizer(half.parameters(), options);
      train(half, half_optimizer, 0, 3);
      Checkpoint checkpoint({.folder = r.dir() + "/script", .group = r.world});
      checkpoint.add("model", first).add("optimizer", half_optimizer);
      checkpoint.save(3);
    }
    barrier({.group = r.world});
    for (const auto& parameter : second.parameters()) parameter.detach().zero_();
    DistributedDataParallel rest(second, {.group = r.world});
    torch::optim::SGD rest_optimizer(rest.parameters(), options);
    Checkpoint checkpoint({.folder = r.dir() + "/script", .group = r.world});
    checkpoint.add("model", second).add("optimizer", rest_optimizer);
    EXPECT_EQ(checkpoint.load().value_or(0), 3);
    train(rest, rest_optimizer, 3, 6);
    const auto expected = ddp.parameters(), actual = rest.parameters();
    // Not the same bits: a script is optimised after its first calls, and rounds otherwise then.
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(torch::allclose(actual[i], expected[i], 1e-5, 1e-6)) << i;
    }
    EXPECT_TRUE(torch::allclose(buffer_of_script(second, "mean"), buffer_of_script(straight, "mean"), 1e-5, 1e-6));
  });
}

void train_with_uneven_inputs(Rank& r, bool broadcast_buffers) {
  NetImpl net, whole;
  fill(net, 3);
  fill(whole, 3);
  DistributedDataParallel ddp(scripted(net), {.broadcast_buffers = broadcast_buffers, .group = r.world});
  const Tensor batch = numbers({8, 8});
  const Tensor own = shard(batch, r.rank, 2);
  Accumulation accumulation(ddp, 2);
  for (int i = 0; i < 2; ++i) {
    const auto step = accumulation.step();
    accumulation.scale(loss_of(ddp(own.narrow(0, 2 * i, 2)).toTensor())).backward();
  }
  loss_of(whole.forward(batch)).backward();
  expect_close(gradients_of_script(ddp.module()), gradients_of(whole), 1e-5);
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  with_uneven_inputs(ddp, [&] {
    for (int i = 0; i <= r.rank; ++i) {
      optimizer.zero_grad();
      loss_of(ddp(own).toTensor()).backward();
      optimizer.step();
    }
    const torch::NoGradGuard no_grad;
    ddp(own + r.rank);  // puts another tensor in the place of `mean`, and no backward follows
  });
  for (const Tensor& parameter : ddp.parameters()) expect_same_on_all(r, parameter.detach());
  expect_same_on_all(r, buffer_of_script(ddp.module(), "mean"));
}

TEST(DdpScript, NoSyncAccumulationAndUnevenInputs) {
  for (const bool broadcast_buffers : {true, false})
    run_ranks({.n = 2}, [&](Rank& r) { train_with_uneven_inputs(r, broadcast_buffers); });
}

TEST(DdpScript, ErrorsNameWhatIsWrong) {
  run_ranks({.n = 2}, [](Rank& r) {
    NetImpl net;
    fill(net, 3);
    auto module = scripted(net);
    if (r.rank == 1) module.register_buffer("more", torch::zeros({2}));
    const Caught differs =
        catch_error([&] { const DistributedDataParallel<torch::jit::Module> ddp(module, {.group = r.world}); });
    EXPECT_TRUE(differs.is(ErrorKind::invalid_argument)) << differs;
    EXPECT_NE(differs.text.find("buffer more"), std::string::npos) << differs;

    auto converted = scripted(net);
    DistributedDataParallel ddp(converted, {.group = r.world});
    converted.to(torch::kFloat64);
    const Caught changed = catch_error([&] { ddp(numbers({4, 8})); });
    EXPECT_NE(changed.text.find("was converted from Float to Double"), std::string::npos) << changed;
  });
}

// ---- Lists of tensors -----------------------------------------------------------------------------------------------

TEST(GradientAverager, AveragesTensorsThatBelongToNoModule) {
  for (const int n : {1, 2, 3}) {
    run_ranks({.n = n}, [](Rank& r) {
      const auto leaf = [&](torch::IntArrayRef sizes, int seed) {
        return numbers(sizes, seed).set_requires_grad(true);
      };
      Tensor weight = leaf({8, 4}, 1 + r.rank), bias = leaf({4}, 2 + r.rank);
      const Tensor frozen = numbers({4}, 3 + r.rank), mean = numbers({8}, 4 + r.rank);
      GradientAverager ddp({{"weight", weight}, {"bias", bias}, {"frozen", frozen}}, {{"mean", mean}},
                           {.bucket_cap_mb = kTiny, .group = r.world});
      EXPECT_EQ(ddp.trained_parameters().size(), 2u);
      for (const Tensor& tensor : {weight.detach(), bias.detach(), frozen, mean}) expect_same_on_all(r, tensor);
      EXPECT_TRUE(torch::equal(frozen, numbers({4}, 3)));

      const auto loss = [&](const Tensor& x, const Tensor& w, const Tensor& b) {
        return loss_of(torch::tanh((x - mean).matmul(w) + b) * frozen);
      };
      for (int step = 0; step < 3; ++step) {
        Tensor whole_weight = weight.detach().clone().set_requires_grad(true);
        Tensor whole_bias = bias.detach().clone().set_requires_grad(true);
        const Tensor batch = numbers({12, 8}, step);
        loss(batch, whole_weight, whole_bias).backward();
        weight.mutable_grad() = bias.mutable_grad() = Tensor();
        const Tensor own = loss(shard(batch, r.rank, r.size), weight, bias);
        mean.add_(r.rank);
        own.backward();
        expect_same_on_all(r, mean);  // rank 0's
        expect_close({{"weight", weight.grad()}, {"bias", bias.grad()}},
                     {{"weight", whole_weight.grad()}, {"bias", whole_bias.grad()}}, 2e-6);
        expect_same_on_all(r, weight.grad());
        const torch::NoGradGuard no_grad;
        weight -= 0.1 * weight.grad();
        bias -= 0.1 * bias.grad();
      }
      EXPECT_EQ(ddp.statistics().parameters, 2u);

      const Tensor computed = weight * 2;
      const Caught caught =
          catch_error([&] { const GradientAverager no({{"twice", computed}}, {}, {.group = r.world}); });
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
      EXPECT_NE(caught.text.find("parameter twice is the result of a computation"), std::string::npos) << caught;
    });
  }
}

}  // namespace
}  // namespace maniple::harness::ddp_tensors_test
