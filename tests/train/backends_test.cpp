// A network learns drawn digits on each backend of this build, with the loss curve that it has on native.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <sstream>

#include "comm/backend/backend.h"
#include "comm/base/format.h"
#include "harness/run_ranks.h"
#include <maniple/maniple.h>

namespace maniple::backends_test {
namespace {

using harness::As;
using harness::Rank;
using harness::run_ranks;

constexpr int kSteps = 24;

std::string train(Rank& r) {
  init_process_group(r.world);
  torch::set_num_threads(1);
  seed_all(11, 0);  // the same weights on all ranks and in all runs
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 5).stride(2)), torch::nn::ReLU(),
                            torch::nn::Flatten(), torch::nn::Linear(4 * 12 * 12, 10), torch::nn::LogSoftmax(1));
  DistributedDataParallel ddp(net);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  DistributedSampler sampler(600, {.shuffle = true, .seed = 3});
  auto loader =
      torch::data::make_data_loader(Mnist::drawn(600, 1).map(torch::data::transforms::Stack<>()), sampler,
                                    torch::data::DataLoaderOptions().batch_size(static_cast<std::size_t>(24 / r.size)));
  std::string curve;
  for (auto& batch : *loader) {
    optimizer.zero_grad();
    const auto loss = torch::nll_loss(net->forward(batch.data), batch.target);
    loss.backward();
    optimizer.step();
    auto mean = loss.detach().clone();
    all_reduce(mean, ReduceOp::avg);
    curve += format_text("{:.9g} ", mean.item<float>());
  }
  destroy_process_group();
  return curve;
}

/// The losses of the steps, by rank; empty where the run did not take place.
std::map<int, std::vector<double>> curves(const std::string& backend, int n) {
  const auto result = run_ranks({.n = n, .as = As::processes, .backend = backend, .limit = std::chrono::seconds(120)},
                                [](Rank& r) { r.report("curve", train(r)); });
  std::map<int, std::vector<double>> all;
  for (const auto& [rank, text] : result.texts("curve")) {
    std::istringstream in(text);
    for (double loss = 0; in >> loss;) all[rank].push_back(loss);
  }
  return all;
}

struct Case {
  std::string backend;
  int n;
};

std::vector<Case> others() {
  std::vector<Case> all;
  for (const BackendEntry& entry : backends()) {
    if (entry.name == "native" || entry.device != DeviceType::cpu || !entry.missing().empty()) continue;
    for (const int n : {2, 3}) all.push_back({std::string(entry.name), n});
  }
  return all;
}

class Training : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(On, Training, testing::ValuesIn(others()),
                         [](const auto& test) { return format_text("{}{}", test.param.backend, test.param.n); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Training);

TEST_P(Training, HasTheLossCurveOfNative) {
  const auto& [backend, n] = GetParam();
  const auto native = curves("native", n);
  const auto other = curves(backend, n);
  if (native.empty() || other.empty()) return;  // a rank on its way to its own run
  EXPECT_EQ(native.size(), static_cast<std::size_t>(n));
  ASSERT_EQ(other.size(), native.size());
  const std::vector<double>& expected = native.at(0);
  ASSERT_GE(expected.size(), static_cast<std::size_t>(kSteps));
  EXPECT_LT(expected.back(), 0.5 * expected.front()) << "nothing was learnt";
  for (const auto& [rank, curve] : other) {
    ASSERT_EQ(curve.size(), expected.size());
    for (std::size_t step = 0; step < curve.size(); ++step) {
      // Sums in another order are rounded otherwise, and training carries that on.
      EXPECT_NEAR(curve[step], expected[step], 1e-3 * std::abs(expected[step]) + 1e-5)
          << "rank " << rank << ", step " << step;
    }
  }
}

}  // namespace
}  // namespace maniple::backends_test
