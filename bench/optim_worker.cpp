// `maniple bench optim`: the time of an optimizer step, for LibTorch and Maniple in turn.
//
//   optim_worker MODELS SECONDS      prints a table, and each of its rows as a JSON object
//
// small: 200 tensors of up to 4096 elements, where the calls cost more than the arithmetic. large: 25 million elements
// in 48 tensors, where memory accesses cost more. Each optimizer has its own parameters; both use the same gradients.
// Blocks of steps alternate, so that disturbances of the machine hit both. The figure is the median over blocks,
// divided by the steps per block.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <maniple/train/optim.h>

namespace {

using Clock = std::chrono::steady_clock;
using torch::Tensor;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

std::vector<std::vector<std::int64_t>> shapes_of(const std::string& model) {
  std::vector<std::vector<std::int64_t>> shapes;
  const bool small = model == "small";
  for (int i = 0; i < (small ? 100 : 24); ++i) {
    const std::int64_t width = small ? 64 : 1024;
    shapes.push_back({width, width});
    shapes.push_back({width});
  }
  return shapes;
}

/// New parameters with these gradients.
std::vector<Tensor> parameters_with(const std::vector<Tensor>& gradients) {
  std::vector<Tensor> parameters;
  for (const Tensor& gradient : gradients) {
    parameters.push_back(torch::ones_like(gradient).requires_grad_());
    parameters.back().mutable_grad() = gradient;
  }
  return parameters;
}

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor>)>;
struct Contest {
  const char* name;
  Make torch, maniple;
};

template <class T, class Options>
Make make(Options options) {
  return [options](std::vector<Tensor> parameters) { return std::make_unique<T>(std::move(parameters), options); };
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void measure(const std::string& model, const Contest& contest, double seconds) {
  std::vector<Tensor> gradients;
  std::int64_t elements = 0;
  for (const auto& shape : shapes_of(model)) {
    gradients.push_back(torch::randn(shape) * 0.01);
    elements += gradients.back().numel();
  }
  const auto theirs = contest.torch(parameters_with(gradients));
  const auto ours = contest.maniple(parameters_with(gradients));
  theirs->step(), ours->step();  // creates the optimizers' states
  const auto begin = Clock::now();
  theirs->step();
  const int steps = std::max(1, static_cast<int>(0.02 / seconds_since(begin)));  // per block
  const auto block = [steps](torch::optim::Optimizer& optimizer) {
    const auto first = Clock::now();
    for (int i = 0; i < steps; ++i) optimizer.step();
    return seconds_since(first) / steps * 1e3;
  };
  std::vector<double> torch_ms, maniple_ms;
  const auto start = Clock::now();
  while (torch_ms.size() < 5 || seconds_since(start) < seconds) {
    torch_ms.push_back(block(*theirs));
    maniple_ms.push_back(block(*ours));
  }
  const double a = median(torch_ms), b = median(maniple_ms);
  std::printf("%-10s %-6s %8zu %11lld %8d %10.3f %11.3f %8.2f\n", contest.name, model.c_str(), gradients.size(),
              static_cast<long long>(elements), at::get_num_threads(), a, b, a / b);
  std::printf(
      "{\"optimizer\": \"%s\", \"model\": \"%s\", \"tensors\": %zu, \"parameters\": %lld, \"threads\": %d, "
      "\"torch_ms\": %.4f, \"maniple_ms\": %.4f, \"speedup\": %.3f}\n",
      contest.name, model.c_str(), gradients.size(), static_cast<long long>(elements), at::get_num_threads(), a, b,
      a / b);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: optim_worker MODELS SECONDS; `maniple bench optim` starts it\n");
    return 2;
  }
  namespace theirs = torch::optim;
  namespace ours = maniple::optim;
  const auto sgd = theirs::SGDOptions(1e-3).momentum(0.9);
  const theirs::AdamOptions adam(1e-3);
  const theirs::AdamWOptions adamw(1e-3);
  const std::vector<Contest> contests = {
      {"SGD", make<theirs::SGD>(sgd), make<ours::SGD>(sgd)},
      {"Adam", make<theirs::Adam>(adam), make<ours::Adam>(adam)},
      {"AdamW", make<theirs::AdamW>(adamw), make<ours::AdamW>(adamw)},
  };
  std::vector<std::string> models;
  std::istringstream list(argv[1]);
  for (std::string model; std::getline(list, model, ',');) {
    if (model != "small" && model != "large") {
      std::fprintf(stderr, "no model \"%s\"; expected small or large\n", model.c_str());
      return 2;
    }
    models.push_back(model);
  }
  std::printf("%-10s %-6s %8s %11s %8s %10s %11s %8s\n", "optimizer", "model", "tensors", "parameters", "threads",
              "torch_ms", "maniple_ms", "speedup");
  for (const std::string& model : models) {
    for (const Contest& contest : contests) measure(model, contest, std::atof(argv[2]));
  }
}
