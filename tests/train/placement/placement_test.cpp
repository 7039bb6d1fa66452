// Models over several devices of one process: CPU slots here, GPUs where there are some.
#include <sched.h>

#include <cmath>
#include <numeric>
#include <thread>

#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "train/gradients.h"
#include <maniple/maniple.h>

namespace maniple::harness::placement_test {
namespace {

namespace nn = torch::nn;

/// Two slots, or the GPU and a slot: tensors have to move there.
std::vector<ComputeDevice> two_devices() {
  if (!test_device().is_cpu()) return {training_device(), cpu_slot()};
  return {cpu_slot({.threads = 1}), cpu_slot({.threads = 1})};
}

struct SplitImpl : nn::Module {
  explicit SplitImpl(const std::vector<ComputeDevice>& on)
      : fc1(register_module("fc1", place(nn::Linear(8, 16), on[0]))),
        fc2(register_module("fc2", place(nn::Linear(16, 4), on[1]))) {}
  torch::Tensor forward(const torch::Tensor& x) { return fc2(torch::tanh(fc1(x))); }
  Placed<nn::Linear> fc1, fc2;
};
TORCH_MODULE(Split);

void fill_in_place(nn::Module& module, int seed) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.copy_(numbers(parameter.sizes(), seed++) * 0.3);
}

/// Without the "module." of placed modules.
Gradients plain(const Gradients& placed) {
  Gradients result;
  for (auto [name, gradient] : placed) {
    const auto at = name.find("module.");
    result[at == std::string::npos ? name : name.substr(0, at) + name.substr(at + 7)] = gradient.cpu();
  }
  return result;
}

nn::Sequential layers(bool norm = false) {
  nn::Sequential all(nn::Linear(8, 16), nn::ReLU(nn::ReLUOptions().inplace(true)), nn::Linear(16, 16), nn::Tanh(),
                     nn::Linear(16, 4));
  if (norm) all->push_back(nn::BatchNorm1d(4));
  return all;
}

TEST(Placement, APlacedModelEqualsTheUndividedOne) {
  Net whole;
  Split split(two_devices());
  fill(*whole, 3);
  fill_in_place(*split, 3);
  torch::Tensor x = numbers({6, 8}).requires_grad_(), same = x.detach().clone().requires_grad_();
  const auto expected = whole(x), actual = split(same);
  loss_of(expected).backward();
  loss_of(actual).backward();
  if (test_device().is_cpu()) {
    EXPECT_TRUE(torch::equal(actual, expected));
    expect_identical(plain(gradients_of(*split)), gradients_of(*whole));
    EXPECT_TRUE(torch::equal(same.grad(), x.grad()));
  } else {
    expect_close(plain(gradients_of(*split)), gradients_of(*whole), 1e-5);
  }
  for (const auto& item : split->named_parameters()) {
    EXPECT_EQ(item.value().grad().device(), item.value().device()) << item.key();
  }
}

TEST(Placement, ASlotHasAThreadWithItsCoresAndTheCallersSettings) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  ASSERT_EQ(::sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  int core = 0;
  while (!CPU_ISSET(static_cast<std::size_t>(core), &allowed)) ++core;
  const ComputeDevice slot = cpu_slot({.cores = {core}});
  std::thread::id first, second;
  int cores = 0, threads = 0;
  bool grad = true;
  const torch::NoGradGuard no_grad;
  slot.run([&] {
    first = std::this_thread::get_id();
    slot.run([&] { second = std::this_thread::get_id(); });  // it does not wait for itself
    cpu_set_t own;
    ::sched_getaffinity(0, sizeof(own), &own);
    cores = CPU_COUNT(&own);
    threads = torch::get_num_threads();
    grad = torch::GradMode::is_enabled();
  });
  EXPECT_NE(first, std::this_thread::get_id());
  EXPECT_EQ(second, first);
  EXPECT_EQ(cores, 1);
  EXPECT_EQ(threads, 1);
  EXPECT_FALSE(grad);
  EXPECT_THROW(slot.run([] { throw std::out_of_range("thrown there"); }), std::out_of_range);
  EXPECT_FALSE(slot == cpu_slot());
  EXPECT_TRUE(slot == ComputeDevice(slot));
}

// Several uses of one tensor: autograd adds in the order of the nodes, which come from several threads
// here.
TEST(Placement, GradientsAreAddedInTheOrderOfOneThread) {
  const auto slots = two_devices();
  if (!test_device().is_cpu()) GTEST_SKIP() << "of the CPU";
  std::vector<torch::Tensor> gradients;
  for (const bool placed : {false, true}) {
    torch::Tensor x = numbers({4, 8}, 5).requires_grad_();
    std::vector<torch::Tensor> parts;
    for (int i = 0; i < 12; ++i) {
      nn::Linear layer(8, 8);
      fill(*layer, 3 * i);
      parts.push_back(placed ? place(layer, slots[static_cast<std::size_t>(i) % 2])(x) : layer(x));
      parts.push_back(torch::sin(x * (0.1 * i)));
    }
    torch::stack(parts).pow(2).sum().backward();
    gradients.push_back(x.grad());
  }
  EXPECT_TRUE(torch::equal(gradients[0], gradients[1]));
}

struct PairImpl : nn::Module {
  std::pair<torch::Tensor, torch::Tensor> forward(std::pair<torch::Tensor, torch::Tensor> x, double scale) const {
    return {x.first * scale, x.second + 1};
  }
};
TORCH_MODULE(Pair);

TEST(Placement, PlacedModulesArePartsOfModulesAndSequentials) {
  const auto on = two_devices();
  nn::Sequential all(place(nn::Linear(8, 16), on[0]), nn::Functional(torch::relu), place(layers(), on[1]));
  EXPECT_ANY_THROW(all->forward(numbers({2, 8}))) << "16 columns do not fit";
  nn::Sequential fits(place(nn::Linear(8, 8), on[0]), place(layers(), on[1]));
  EXPECT_EQ(fits->forward(numbers({2, 8})).sizes(), (std::vector<std::int64_t>{2, 4}));
  EXPECT_EQ(fits->named_parameters().keys().front(), "0.module.weight");

  const auto pair = place(Pair(), on[1]);
  const auto result = pair(std::pair(numbers({3}), numbers({2})), 2.0);
  EXPECT_TRUE(torch::equal(result.first.cpu(), numbers({3}).cpu() * 2));
  EXPECT_EQ(result.second.device(), on[1].device());
  auto lstm = place(nn::LSTM(8, 4), on[0]);  // forward has a default
  EXPECT_EQ(std::get<0>(lstm(numbers({5, 2, 8}))).sizes(), (std::vector<std::int64_t>{5, 2, 4}));

  Split net(on);
  net->eval();
  EXPECT_FALSE(net->fc1->is_training() || net->fc1->module()->is_training());
  net->to(torch::kFloat64);
  EXPECT_EQ(net->fc2->module()->weight.scalar_type(), torch::kFloat64);
  const Caught caught = catch_error([&] { net->to(torch::kMeta); });
  EXPECT_TRUE(caught.is(ErrorKind::invalid_argument) && contains(caught.text, "was placed on")) << caught;
}

TEST(Placement, WrongDevicesAreNamed) {
  const auto text = [](const auto& call) { return catch_error(call).text; };
  EXPECT_TRUE(contains(text([] { ComputeDevice(torch::Device("cpu:1")); }), "cpu_slot()"));
  EXPECT_TRUE(contains(text([] { ComputeDevice(torch::Device("meta")); }), "cpu and cuda"));
  EXPECT_TRUE(contains(text([] { ComputeDevice(torch::Device("cuda:99")); }), "CUDA device"));
  EXPECT_TRUE(contains(text([] { cpu_slot({.cores = {100000}}); }), "may not use core 100000"));
  EXPECT_TRUE(contains(text([] { cpu_slot({.threads = -1}); }), "-1 threads"));
  EXPECT_TRUE(contains(text([] { place(nn::Linear(nullptr), torch::kCPU); }), "the module is null"));
  EXPECT_TRUE(contains(text([] { balance(layers(), {}); }), "no devices"));
  EXPECT_TRUE(contains(text([] { balance(nn::Sequential(nn::Tanh()), two_devices()); }), "cannot be cut into 2"));
}

/// Of all cuts the least largest part.
double best_of(const std::vector<double>& costs, std::size_t parts) {
  if (parts == 1) return std::accumulate(costs.begin(), costs.end(), 0.0);
  double best = INFINITY, first = 0;
  for (std::size_t i = 1; i + parts - 1 <= costs.size(); ++i) {
    first += costs[i - 1];
    best = std::min(best,
                    std::max(first, best_of({costs.begin() + static_cast<std::ptrdiff_t>(i), costs.end()}, parts - 1)));
  }
  return best;
}

TEST(Balance, TheLargestPartIsAsSmallAsItCanBe) {
  unsigned state = 1;
  for (std::size_t n = 1; n <= 8; ++n) {
    for (std::size_t parts = 1; parts <= n; ++parts) {
      std::vector<double> costs(n);
      for (double& cost : costs) cost = static_cast<double>((state = state * 1103515245u + 12345u) >> 20 & 15u);
      const auto begins = balanced_cut(costs, parts);
      ASSERT_EQ(begins.size(), parts);
      EXPECT_EQ(begins.front(), 0u);
      double largest = 0;
      for (std::size_t i = 0; i < parts; ++i) {
        const std::size_t end = i + 1 < parts ? begins[i + 1] : n;
        ASSERT_LT(begins[i], end);
        double sum = 0;
        for (std::size_t k = begins[i]; k < end; ++k) sum += costs[k];
        largest = std::max(largest, sum);
      }
      EXPECT_EQ(largest, best_of(costs, parts)) << n << " layers in " << parts;
    }
  }
  EXPECT_TRUE(contains(catch_error([] { balanced_cut(std::vector<double>{1, NAN}, 2); }).text, "cost nan"));
  EXPECT_TRUE(contains(catch_error([] { balanced_cut(std::vector<double>{1}, 0); }).text, "into 0 parts"));
}

/// Costs so much more than the linear layers that no noise hides it.
struct SlowImpl : nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    for (int i = 0; i < 2000; ++i) x = x * 1.0001;
    return x;
  }
};
TORCH_MODULE(Slow);

TEST(Balance, ByBytesOrByTime) {
  const auto on = two_devices();
  nn::Sequential all(nn::Linear(8, 8), Slow(), nn::Linear(8, 8), nn::Linear(8, 400), nn::Dropout(0.5),
                     nn::BatchNorm1d(400));
  fill(*all, 3);
  const auto by_bytes = balance(all, on);
  EXPECT_EQ(by_bytes->begins(),
            (std::vector<std::size_t>{0, 4}));  // 14976 and 6408 bytes; at 3 the second would have 20808
  EXPECT_TRUE(contains(by_bytes->text(), "layers 4 to 5")) << by_bytes->text();

  torch::manual_seed(3);
  const auto mean = all[5]->as<nn::BatchNorm1d>()->running_mean.clone();
  const auto by_time = balance(all, on, {.sample = numbers({4, 8})});
  EXPECT_TRUE(by_time->begins()[1] == 1 || by_time->begins()[1] == 2) << by_time->text();
  const auto drawn = torch::rand({3});
  torch::manual_seed(3);
  EXPECT_TRUE(torch::equal(drawn, torch::rand({3}))) << "measuring draws no random numbers";
  EXPECT_TRUE(torch::equal(mean.cpu(), all[5]->as<nn::BatchNorm1d>()->running_mean.cpu()));
  for (const auto& parameter : all->parameters()) EXPECT_FALSE(parameter.grad().defined());
}

TEST(Balance, ABalancedSequentialIsTheSequential) {
  nn::Sequential whole = layers(true), parts = layers(true);
  fill(*whole, 5);
  fill(*parts, 5);
  auto placed = balance(parts, two_devices());
  EXPECT_EQ(placed->named_parameters().keys(), whole->named_parameters().keys());
  EXPECT_EQ(placed->named_buffers().keys(), whole->named_buffers().keys());
  const int threads = at::get_num_threads();
  at::set_num_threads(1);  // as the slots have: batch norm adds in another order with several
  for (int step = 0; step < 2; ++step) {
    loss_of(whole->forward(numbers({6, 8}, step))).backward();
    loss_of(placed->forward(numbers({6, 8}, step))).backward();
  }
  at::set_num_threads(threads);
  if (test_device().is_cpu()) expect_identical(gradients_of(*placed), gradients_of(*whole));
  expect_close(gradients_of(*placed), gradients_of(*whole), 1e-5);
  EXPECT_EQ(placed->forward(torch::zeros({0, 8}).to(training_device())).size(0), 0) << "no rows";
  placed->to(torch::kFloat64);
  EXPECT_EQ(placed->forward(numbers({2, 8}).to(torch::kFloat64)).scalar_type(), torch::kFloat64);
  EXPECT_TRUE(contains(catch_error([&] { placed->to(torch::kMeta); }).text, "were placed on"));
  EXPECT_TRUE(
      contains(catch_error([&] { PlacedSequential(layers(), two_devices(), std::vector<std::size_t>{0, 9}); }).text,
               "rising numbers"));
}

// 2 nodes with 4 devices each, 2 for each process: 4 ranks, each with a model over two devices.
TEST(Placement, DdpOverRanksWithSeveralDevicesEach) {
  run_ranks({.n = 4,
             .as = As::netns,
             .limit = std::chrono::seconds(180),
             .hosts = 2,
             .env = {{"MANIPLE_DEVICES_PER_PROCESS", "2"}, {"CUDA_VISIBLE_DEVICES", ""}}},
            [](Rank& r) {
              const auto devices = my_devices();
              ASSERT_EQ(devices.size(), 2u);
              EXPECT_TRUE(devices[0].is_slot() && devices[1].is_slot() && !(devices[0] == devices[1]));
              EXPECT_TRUE(my_devices() == devices);
              Net whole;
              Split split(devices);
              fill(*whole, 3);
              fill_in_place(*split, 3 + r.rank);  // rank 0's are everyone's from now on
              DistributedDataParallel ddp(split, {.bucket_cap_mb = kTiny, .group = r.world});
              torch::optim::SGD optimizer(split->parameters(), 0.1), reference(whole->parameters(), 0.1);
              for (int step = 0; step < 3; ++step) {
                const torch::Tensor batch = numbers({12, 8}, step);
                split->zero_grad();
                whole->zero_grad();
                loss_of(whole(batch)).backward();
                loss_of(ddp(shard(batch, r.rank, r.size))).backward();
                expect_close(plain(gradients_of(*split)), gradients_of(*whole), 1e-5);
                optimizer.step();
                reference.step();
              }
              expect_same_everywhere(r, *split, false);
              // Measured times differ; the cut does not.
              const auto placed = balance(layers(), devices, {.sample = numbers({4, 8}), .group = r.world});
              for (const std::string& other : r.world->all_gather_objects(std::to_string(placed->begins()[1]))) {
                EXPECT_EQ(other, std::to_string(placed->begins()[1]));
              }
              // What fails on rank 0 fails on all; the group stays usable.
              std::string text = "no error";
              try {
                balance(layers(), devices, {.sample = numbers({4, 7}), .group = r.world});
              } catch (const std::exception& error) {
                text = error.what();
              }
              EXPECT_TRUE(contains(text, r.rank == 0 ? "mat1 and mat2" : "failed on rank 0")) << text;
              r.world->barrier();
            });
}

}  // namespace
}  // namespace maniple::harness::placement_test
