// DataParallel against its definition: replicas on parts of a batch do what the module does on the whole batch.
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <thread>

#include "comm/base/format.h"
#include "harness/leaks.h"
#include "harness/sanitizers.h"
#include "train/data_parallel/data_parallel_models.h"
#include "train/gradients.h"
#include "train/tensor/torch_compat.h"
#include <maniple/maniple.h>

namespace maniple::harness::data_parallel_test {
namespace {

using torch::Tensor;

struct Case {
  std::string name;
  std::size_t replicas = 2;
  std::int64_t rows = 12;
  torch::ScalarType dtype = torch::kFloat32;
  bool share = true;
  double more_tolerance = 0;
};
class DataParallelParity : public testing::TestWithParam<Case> {};

TEST_P(DataParallelParity, TrainsAsTheModuleAlone) {
  const Case& given = GetParam();
  Twin whole, net;
  for (auto* module : {&whole, &net}) {
    fill(**module, 3);
    (*module)->to(given.dtype);
  }
  DataParallel dp(net, {.devices = cpus(given.replicas), .share_parameters = given.share});
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  torch::optim::SGD whole_optimizer(whole->parameters(), options), optimizer(net->parameters(), options);
  const double allowed = tolerance(given.dtype) + given.more_tolerance;
  for (int step = 0; step < 4; ++step) {
    const Tensor batch = numbers({given.rows, 8}, step).to(given.dtype);
    whole->zero_grad();
    dp->zero_grad(step % 2 == 0);
    const Tensor expected = whole->forward(batch), output = dp->forward(batch);
    ASSERT_EQ(output.sizes(), expected.sizes());
    EXPECT_TRUE(torch::allclose(output, expected, allowed * 10, allowed)) << step;
    loss_of(expected).backward();
    loss_of(output).backward();
    expect_close(gradients_of(*net), gradients_of(*whole), allowed);
    whole_optimizer.step();
    optimizer.step();
  }
}

std::vector<Case> parity_cases() {
  std::vector<Case> all;
  for (const std::size_t n : {1, 2, 3, 4}) {
    for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
      for (const std::int64_t rows : {1, 2, 5, 7, 12}) {
        all.push_back({format_text("{}Replicas{}Rows{}", n, rows, c10::toString(dtype)), n, rows, dtype});
      }
    }
    all.push_back({format_text("{}ReplicasCopied", n), n, 12, torch::kFloat64, false});
  }
  all.push_back({"BFloat16", 2, 12, torch::kBFloat16, true, 3e-2});
  return all;
}
INSTANTIATE_TEST_SUITE_P(DataParallel, DataParallelParity, testing::ValuesIn(parity_cases()),
                         [](const auto& one) { return one.param.name; });

TEST(DataParallel, CutsAsTorchChunkDoes) {
  Scripted net([](ScriptedImpl&, const Tensor& x) { return torch::full({x.size(0)}, x.size(0), torch::kInt64); });
  for (const std::size_t n : {1, 2, 3, 4}) {
    const DataParallel dp(net, {.devices = cpus(n)});
    for (const std::int64_t rows : {0, 1, 2, 3, 4, 5, 6, 7, 9}) {
      const Tensor x = torch::zeros({rows, 2});
      std::vector<Tensor> expected;
      for (const Tensor& part : x.chunk(rows > 0 ? static_cast<std::int64_t>(n) : 1)) {
        expected.push_back(torch::full({part.size(0)}, part.size(0), torch::kInt64));
      }
      EXPECT_TRUE(torch::equal(dp.forward(x), torch::cat(expected))) << n << " replicas, " << rows << " rows";
    }
  }
}

TEST(DataParallel, ScattersAndGathersAlongAnotherDimension) {
  Scripted net([](ScriptedImpl& self, const Tensor& x) { return x * self.weight; });
  const Tensor x = numbers({3, 5, 2});
  for (const std::int64_t dim : {1, 2, -1, -2}) {
    const DataParallel dp(net, {.devices = cpus(2), .dim = dim});
    net->zero_grad();
    const Tensor y = dp(x.transpose(0, 2).transpose(0, 2));
    EXPECT_TRUE(torch::equal(y, x));
    (y * y).sum().backward();
    EXPECT_NEAR(net->weight.grad().item<double>(), 2 * x.square().sum().item<double>(), 1e-4);
  }
}

TEST(DataParallel, NestsOfTensorsGoInAndOut) {
  Nested net;
  fill(*net, 1);
  const Tensor x = numbers({5, 8}), mask = numbers({5, 1}, 2), shift = numbers({5, 4}, 3);
  const auto more = std::pair(numbers({5, 3}, 4), std::vector{numbers({5, 4}, 5)});
  const DataParallel dp(net, {.devices = cpus(3)});
  const auto same = [](const NestedImpl::Output& a, const NestedImpl::Output& b) {
    const auto [a0, a1, a2, a3] = a;
    const auto [b0, b1, b2, b3] = b;
    EXPECT_TRUE(torch::allclose(a0, b0, 1e-6, 1e-6));
    ASSERT_EQ(a1.size(), 2u);
    for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(torch::allclose(a1[i], b1[i], 1e-6, 1e-6));
    EXPECT_TRUE(torch::allclose(a2.at("a"), b2.at("a"), 1e-5, 1e-6));
    EXPECT_TRUE(torch::equal(a2.at("b"), b2.at("b")));
    ASSERT_EQ(a3.has_value(), b3.has_value());
    if (a3) {
      EXPECT_TRUE(torch::equal(*a3, *b3));
    }
  };
  same(dp->forward(x, more, 2.0, mask, std::optional(shift)), net->forward(x, more, 2.0, mask, shift));
  const auto output = dp->forward(x, more, 0.5, Tensor(), std::optional<Tensor>());
  same(output, net->forward(x, more, 0.5, Tensor(), std::nullopt));
  // Only one of the results is used, and it is not the first.
  net->zero_grad();
  std::get<2>(net->forward(x, more, 0.5, Tensor(), std::nullopt)).at("a").square().sum().backward();
  const Gradients expected = gradients_of(*net);
  net->zero_grad();
  std::get<2>(output).at("a").square().sum().backward();
  expect_close(gradients_of(*net), expected, 1e-6);
}

TEST(DataParallel, GradientsReachWhatComesBefore) {
  torch::nn::Linear before(6, 8);
  Twin whole, net;
  fill(*before, 9);
  fill(*whole, 3);
  fill(*net, 3);
  const DataParallel dp(net, {.devices = cpus(3)});
  const Tensor x = numbers({7, 6}).requires_grad_();
  loss_of(whole->forward(before->forward(x))).backward();
  const Tensor of_x = x.grad().clone(), of_before = before->weight.grad().clone();
  before->zero_grad();
  x.mutable_grad() = Tensor();
  loss_of(dp.forward(before->forward(x))).backward();
  EXPECT_TRUE(torch::allclose(x.grad(), of_x, 1e-5, 1e-7));
  EXPECT_TRUE(torch::allclose(before->weight.grad(), of_before, 1e-5, 1e-7));
  expect_close(gradients_of(*net), gradients_of(*whole), 2e-6);
  // Asked for one thing alone.
  const auto only = torch::autograd::grad({loss_of(dp.forward(before->forward(x)))}, {net->fc2->bias});
  EXPECT_TRUE(torch::allclose(only[0], whole->fc2->bias.grad(), 1e-5, 1e-6));
}

TEST(DataParallel, GradientsAddUpAndHooksSeeTheSum) {
  Twin whole, net;
  fill(*whole, 3);
  fill(*net, 3);
  const DataParallel dp(net, {.devices = cpus(2), .share_parameters = false});
  int called = 0;
  Tensor seen;
  net->fc1->weight.register_hook([&](const Tensor& gradient) {
    ++called;
    seen = gradient.clone();
  });
  const Tensor a = numbers({6, 8}, 1), b = numbers({5, 8}, 2);
  const Tensor first = loss_of(dp.forward(a)), second = loss_of(dp.forward(b));  // two graphs at a time
  first.backward();
  EXPECT_EQ(called, 1);
  loss_of(whole->forward(a)).backward();
  EXPECT_TRUE(torch::allclose(seen, whole->fc1->weight.grad(), 1e-5, 1e-7));
  second.backward();
  loss_of(whole->forward(b)).backward();
  EXPECT_EQ(called, 2);
  expect_close(gradients_of(*net), gradients_of(*whole), 2e-6);
}

TEST(DataParallel, ScalarsBecomeAVector) {
  Scripted net([](ScriptedImpl& self, const Tensor& x) { return (x * self.weight).mean(); });
  const DataParallel dp(net, {.devices = cpus(2)});
  const Tensor x = numbers({6, 2}), losses = dp.forward(x);
  ASSERT_EQ(losses.sizes(), (std::vector<std::int64_t>{2}));
  losses.mean().backward();
  EXPECT_NEAR(net->weight.grad().item<double>(), x.mean().item<double>(), 1e-6);
  EXPECT_EQ(dp.forward(x.narrow(0, 0, 1)).sizes(), (std::vector<std::int64_t>{1}));
}

TEST(DataParallel, TiedParametersGetOneGradient) {
  Tied whole, net;
  fill(*whole, 2);
  fill(*net, 2);
  const Tensor x = numbers({5, 8});
  loss_of(whole->forward(x)).backward();
  const DataParallel cloned(net, {.devices = cpus(2)});
  const DataParallel untied(net, {.devices = cpus(2)}, [] { return Tied(false); });  // only the module has it tied
  for (const auto* dp : {&cloned, &untied}) {
    net->zero_grad();
    loss_of(dp->forward(x)).backward();
    expect_close(gradients_of(*net), gradients_of(*whole), 2e-6);
  }
}

// ---- Threads ----------------------------------------------------------------------------------------------------

/// A barrier of `count` threads; false if they do not all arrive within ten seconds.
class TimedBarrier {
 public:
  explicit TimedBarrier(int count) : awaited_(count) {}
  bool wait() {
    std::unique_lock lock(mutex_);
    const int round = round_;
    if (++here_ == awaited_) {
      here_ = 0;
      ++round_;
      all_.notify_all();
      return true;
    }
    return all_.wait_for(lock, std::chrono::seconds(10), [&] { return round_ != round; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int awaited_, here_ = 0, round_ = 0;
};

TEST(DataParallel, ForwardAndBackwardRunAtTheSameTime) {
  const auto forward = std::make_shared<TimedBarrier>(3), backward = std::make_shared<TimedBarrier>(3);
  const auto arrived = std::make_shared<std::atomic<int>>(0);
  Scripted net([=](ScriptedImpl& self, const Tensor& x) {
    if (forward->wait()) ++*arrived;
    const Tensor y = x * self.weight;
    y.register_hook([=](const Tensor&) {
      if (backward->wait()) ++*arrived;
    });
    return y;
  });
  const DataParallel dp(net, {.devices = cpus(3)});
  for (int step = 1; step <= 2; ++step) {
    dp.forward(numbers({3, 2})).sum().backward();
    EXPECT_EQ(*arrived, 6 * step);
  }
}

TEST(DataParallel, ReplicasHaveTheCallersSettings) {
  Scripted net([](ScriptedImpl& self, const Tensor& x) {
    const bool grad = torch::GradMode::is_enabled(), inference = c10::InferenceMode::is_enabled();
    return torch::full({x.size(0)}, (grad ? 1 : 0) + (inference ? 2 : 0) + (self.is_training() ? 4 : 0), torch::kInt64);
  });
  DataParallel dp(net, {.devices = cpus(2)});
  const auto seen = [&] {
    const Tensor all = dp.forward(torch::zeros({2, 1}));
    EXPECT_EQ(all[0].item<int>(), all[1].item<int>());
    return all[1].item<int>();
  };
  EXPECT_EQ(seen(), 1 + 4);
  {
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(seen(), 4);
  }
  {
    const c10::InferenceMode inference;
    EXPECT_EQ(seen(), 2 + 4);
  }
  dp->eval();
  EXPECT_EQ(seen(), 1);
  net->train();
  EXPECT_EQ(seen(), 1 + 4);
}

TEST(DataParallel, AutocastIsCarriedOver) {
  Twin net;
  const DataParallel dp(net, {.devices = cpus(2)});
  EXPECT_EQ(dp.forward(numbers({4, 8})).scalar_type(), torch::kFloat32);
  enable_autocast(torch::kCPU, true);
  const auto before = autocast_dtype(torch::kCPU);
  set_autocast_dtype(torch::kCPU, torch::kBFloat16);
  const Tensor output = dp.forward(numbers({4, 8}));
  enable_autocast(torch::kCPU, false);
  at::autocast::clear_cache();
  set_autocast_dtype(torch::kCPU, before);
  EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
  loss_of(output.to(torch::kFloat32)).backward();
  EXPECT_EQ(net->fc1->weight.grad().scalar_type(), torch::kFloat32);
}

TEST(DataParallel, IntraOpThreadsAreShared) {
  const int before = at::get_num_threads();
  const auto restore = std::shared_ptr<void>(nullptr, [&](void*) { at::set_num_threads(before); });
  Scripted net(
      [](ScriptedImpl&, const Tensor& x) { return torch::full({x.size(0)}, at::get_num_threads(), torch::kInt64); });
  const auto seen = [&](int threads, int caller) {
    at::set_num_threads(caller);
    const DataParallel dp(net, {.devices = cpus(2), .threads = threads});
    const Tensor all = dp.forward(torch::zeros({2, 1}));
    EXPECT_EQ(at::get_num_threads(), caller);
    int elsewhere = 0;
    std::thread([&] { elsewhere = at::get_num_threads(); }).join();
    EXPECT_EQ(elsewhere, caller);
    EXPECT_EQ(all[0].item<int>(), all[1].item<int>());
    return all[0].item<int>();
  };
  EXPECT_EQ(seen(0, 4), 2);
  EXPECT_EQ(seen(0, 1), 1);
  EXPECT_EQ(seen(3, 4), 3);
}

long resident_kib() {
  std::ifstream file("/proc/self/statm");
  long pages = 0;
  file >> pages >> pages;
  return pages * (::sysconf(_SC_PAGESIZE) / 1024);
}

TEST(DataParallel, NothingGrowsAndNothingIsLeft) {
  Twin net(true);
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  const Tensor batch = numbers({16, 8});
  const auto train = [&](const auto& dp, int steps) {
    for (int i = 0; i < steps; ++i) {
      net->zero_grad();
      loss_of(dp.forward(batch)).backward();
      optimizer.step();
    }
  };
  train(DataParallel(net, {.devices = cpus(3)}), 20);  // whatever LibTorch starts, it starts now
  const ProcessResources before = ProcessResources::now();
  {
    const DataParallel dp(net, {.devices = cpus(3)});
    train(dp, kSanitized ? 20 : 200);
    const long start = resident_kib();
    if (!kSanitized) {  // a sanitizer keeps what is freed
      train(dp, 500);
      EXPECT_LT(resident_kib() - start, 2048) << "KiB more after 500 steps";
    }
  }
  for (int i = 0; i < 20; ++i) train(DataParallel(net, {.devices = cpus(4)}), 1);
  Tensor loss;
  {
    const DataParallel dp(net, {.devices = cpus(2)});
    loss = loss_of(dp.forward(batch));
  }
  net->zero_grad();
  loss.backward();  // the graph outlives the DataParallel
  EXPECT_GT(net->fc1->weight.grad().abs().sum().item<double>(), 0);
  loss.reset();
  const auto leaked = ProcessResources::leaked_since(before);
  EXPECT_TRUE(leaked.empty()) << joined(leaked, "\n");
}

TEST(DataParallel, SeveralThreadsTakeTurns) {
  Twin net;
  fill(*net, 4);
  const DataParallel dp(net, {.devices = cpus(2)});
  const Tensor x = numbers({6, 8}), expected = net->forward(x);
  std::atomic<int> right = 0;
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      for (int k = 0; k < 20; ++k) right += torch::allclose(dp.forward(x), expected, 1e-5, 1e-6) ? 1 : 0;
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(right, 60);
}

}  // namespace
}  // namespace maniple::harness::data_parallel_test
