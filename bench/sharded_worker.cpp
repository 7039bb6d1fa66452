// `maniple bench sharded`: the gain from dividing the optimizer over ranks. Compares AdamW on every rank,
// ShardedOptimizer, and ShardedOptimizer with shared_parameters.
//
//   sharded_worker RANKS SECONDS [WIDTH]      prints a table, and each of its rows as a JSON object
//
// The network has three layers of WIDTH x WIDTH (1536: 7 million parameters) and is trained data-parallel with a batch
// of 4 and one thread per rank. The three optimizers have separate networks and run blocks of steps in turn, so that
// disturbances of the machine hit all. Times are medians over blocks, of the slowest rank. Processor time is summed
// over all ranks and is more meaningful on a busy machine. Parameter memory is the sum over ranks of the Pss in
// /proc/self/smaps, where a page that n processes map counts 1/n in each.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <maniple/launch/spawn.h>
#include <maniple/maniple.h>

namespace {

using torch::Tensor;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::int64_t width) {
    for (int i = 0; i < 3; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
  }
  Tensor forward(Tensor x) {
    for (auto& layer : layers) x = torch::relu(layer->forward(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

double now(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

double over_ranks(double value, maniple::ReduceOp op) {
  maniple::get_default_group()->all_reduce(maniple::buffer_of(value), op);
  return value;
}

/// This rank's share (Pss) of the mappings that contain these parameters and no other data; 0: the parameters are in
/// other memory.
double shared_mapping_bytes(const std::vector<Tensor>& parameters) {
  std::ifstream in("/proc/self/smaps");
  double total = 0;
  bool ours = false;
  for (std::string line; std::getline(in, line);) {
    unsigned long long begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2 && line.find(':') > line.find(' ')) {
      ours = line.find("memfd") != std::string::npos &&
             std::any_of(parameters.begin(), parameters.end(), [&](const Tensor& one) {
               const auto at = reinterpret_cast<unsigned long long>(one.data_ptr());
               return at >= begin && at < end;
             });
    } else if (ours && line.starts_with("Pss:")) {
      total += std::atof(line.c_str() + 4) * 1024;
    }
  }
  return total;
}

struct Contest {
  const char* name;
  std::shared_ptr<NetImpl> net;
  std::unique_ptr<maniple::DistributedDataParallel<NetImpl>> ddp = nullptr;
  std::unique_ptr<torch::optim::Optimizer> optimizer = nullptr;
  maniple::ShardedOptimizerBase* sharded = nullptr;
  std::vector<double> step_ms = {}, optimizer_ms = {}, cpu_ms = {}, optimizer_cpu_ms = {};
};

Contest contest(const char* name, std::int64_t width, bool sharded, bool shared) {
  Contest one{name, std::make_shared<NetImpl>(width)};
  one.ddp = std::make_unique<maniple::DistributedDataParallel<NetImpl>>(one.net);
  const torch::optim::AdamWOptions options(1e-4);
  if (sharded) {
    auto made = std::make_unique<maniple::ShardedOptimizer<maniple::optim::AdamW>>(
        one.net->parameters(), options, maniple::ShardingOptions{.shared_parameters = shared});
    one.sharded = made.get();
    one.optimizer = std::move(made);
  } else {
    one.optimizer = std::make_unique<maniple::optim::AdamW>(one.net->parameters(), options);
  }
  return one;
}

void run_block(Contest& one, const Tensor& batch, int steps) {
  double optimizer = 0, optimizer_cpu = 0;
  maniple::barrier();
  const double begin = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID);
  for (int step = 0; step < steps; ++step) {
    one.net->zero_grad();
    (*one.ddp)(batch).pow(2).mean().backward();
    const double before = now(CLOCK_MONOTONIC), cpu_before = now(CLOCK_PROCESS_CPUTIME_ID);
    one.optimizer->step();
    optimizer += now(CLOCK_MONOTONIC) - before;
    optimizer_cpu += now(CLOCK_PROCESS_CPUTIME_ID) - cpu_before;
  }
  const double scale = 1e3 / steps;
  const double elapsed = now(CLOCK_MONOTONIC) - begin, used = now(CLOCK_PROCESS_CPUTIME_ID) - cpu;
  one.step_ms.push_back(over_ranks(elapsed, maniple::ReduceOp::max) * scale);
  one.optimizer_ms.push_back(over_ranks(optimizer, maniple::ReduceOp::max) * scale);
  one.cpu_ms.push_back(over_ranks(used, maniple::ReduceOp::sum) * scale);
  one.optimizer_cpu_ms.push_back(over_ranks(optimizer_cpu, maniple::ReduceOp::sum) * scale);
}

void measure(int, double seconds, std::int64_t width) {
  torch::set_num_threads(1);
  maniple::init_process_group();
  torch::manual_seed(1);
  std::vector<Contest> all;
  all.push_back(contest("AdamW on every rank", width, false, false));
  all.push_back(contest("ShardedOptimizer", width, true, false));
  all.push_back(contest("with shared_parameters", width, true, true));
  const Tensor batch = torch::randn({4, width});
  for (Contest& one : all) {
    run_block(one, batch, 2);  // creates buckets and states
    one.step_ms.clear(), one.optimizer_ms.clear(), one.cpu_ms.clear(), one.optimizer_cpu_ms.clear();
  }
  const double begin = now(CLOCK_MONOTONIC);
  for (bool more = true; more;) {
    for (Contest& one : all) run_block(one, batch, 3);
    more = over_ranks(now(CLOCK_MONOTONIC) - begin, maniple::ReduceOp::max) < seconds;  // the same on all ranks
  }
  const int ranks = maniple::get_world_size();
  double bytes = 0;
  for (const Tensor& parameter : all[0].net->parameters()) bytes += static_cast<double>(parameter.nbytes());
  maniple::print_once(ranks, " ranks, ", bytes / 4e6, " million parameters, ", all[0].step_ms.size(),
                      " blocks of 3 steps; ms of a step, ms of processor time of all ranks");
  maniple::print_once(
      "                            step    cpu  optimizer    cpu  state of a rank  copies of parameters");
  for (Contest& one : all) {
    const double state = one.sharded == nullptr ? 2 * bytes : static_cast<double>(one.sharded->state_bytes());
    const double largest = over_ranks(state, maniple::ReduceOp::max);
    const double mapped = over_ranks(shared_mapping_bytes(one.net->parameters()), maniple::ReduceOp::sum);
    const double copies = one.sharded == nullptr ? ranks : mapped / bytes;
    char line[400];
    std::snprintf(line, sizeof line, "%-24s %7.1f %6.1f %10.2f %6.2f %11.1f MiB %21.2f", one.name, median(one.step_ms),
                  median(one.cpu_ms), median(one.optimizer_ms), median(one.optimizer_cpu_ms), largest / 1048576,
                  copies);
    maniple::print_once(line);
    std::snprintf(
        line, sizeof line,
        R"({"kind": "sharded", "name": "%s", "ranks": %d, "parameters": %.0f, "step_ms": %.3f, "step_cpu_ms": %.3f, )"
        R"("optimizer_ms": %.3f, "optimizer_cpu_ms": %.3f, "state_bytes": %.0f, "parameter_copies": %.3f})",
        one.name, ranks, bytes / 4, median(one.step_ms), median(one.cpu_ms), median(one.optimizer_ms),
        median(one.optimizer_cpu_ms), largest, copies);
    maniple::print_once(line);
  }
  maniple::barrier();
  all.clear();
  maniple::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: sharded_worker RANKS SECONDS [WIDTH]; `maniple bench sharded` starts it\n");
    return 2;
  }
  const std::int64_t width = argc > 3 ? std::atoll(argv[3]) : 1536;
  try {
    maniple::spawn(measure, {.nprocs = std::atoi(argv[1])}, std::atof(argv[2]), width);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
