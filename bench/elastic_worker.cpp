// `maniple bench elastic`: the cost of results that do not depend on the number of ranks. Compares a Trainer over
// virtual ranks with a Trainer that averages over ranks.
//
//   elastic_worker RANKS SECONDS      prints a table, and each of its rows as a JSON object
//
//   DDP                     a step of one batch per rank
//   V = R                   the same over as many virtual ranks as ranks
//   DDP, accumulate k       a step of k batches per rank
//   V = k R                 the same over virtual ranks. For RANKS = 3, 5, ... V is the next power of two
//                           above 2 RANKS; k is the largest number of virtual ranks on one rank
//
// The trainings have separate networks and run blocks of steps in turn, so that disturbances of the machine hit all.
// Times are medians over blocks, of the slowest rank, with one thread per rank. CPU times are of all ranks together;
// on a busy machine they disturb each other less.
#include <time.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/elastic_models.h"
#include <maniple/launch/spawn.h>
#include <maniple/maniple.h>

namespace {

using elastic_bench::Images;
using elastic_bench::made;

double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

/// CPU time of this process, in seconds.
double cpu_time() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

double over_ranks(double value, const maniple::ReduceOp& op) {
  maniple::get_default_group()->all_reduce(maniple::buffer_of(value), op);
  return value;
}
double longest(double value) { return over_ranks(value, maniple::ReduceOp::max); }

constexpr int kSteps = 8;  // of a block

/// One training. Not movable: the hook refers to it.
struct Contest {
  Contest(std::string label, const std::string& model, int accumulate, int virtual_ranks) : name(std::move(label)) {
    torch::manual_seed(1);
    net = made(model);
    optimizer = std::make_unique<maniple::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(1e-4));
    maniple::TrainerOptions options{.epochs = 1000, .accumulate = accumulate};
    options.graceful_stop = false;
    options.log_every = 1 << 20;
    options.progress = false;
    options.virtual_ranks = virtual_ranks;
    options.on_step = [this](const maniple::TrainerState&) {
      if (steps++ == 0) began = now(), cpu_began = cpu_time();
      if (steps <= kSteps) return;
      ms = (now() - began) / kSteps * 1e3;
      cpu_ms = (cpu_time() - cpu_began) / kSteps * 1e3;
      trainer->stop();
    };
    trainer = std::make_unique<maniple::Trainer>(net, *optimizer, options);
    loader = std::make_unique<maniple::DataLoader<Images>>(Images{}, maniple::LoaderOptions{.batch_size = 32});
  }

  /// The first step of a block is not counted: it fetches the first batch.
  void run_block() {
    steps = 0;
    maniple::barrier();
    trainer->fit(*loader, [&](auto& batch) {
      return torch::nn::functional::cross_entropy(net->forward(batch.data), batch.target);
    });
    times.push_back(longest(ms));
    cpu_times.push_back(over_ranks(cpu_ms, maniple::ReduceOp::sum));
  }

  std::string name;
  torch::nn::Sequential net{nullptr};
  std::unique_ptr<maniple::optim::AdamW> optimizer;
  std::unique_ptr<maniple::Trainer> trainer;
  std::unique_ptr<maniple::DataLoader<Images>> loader;
  int steps = 0;
  double began = 0, ms = 0, cpu_began = 0, cpu_ms = 0;
  std::vector<double> times, cpu_times;
};

void measure_model(const std::string& model, double seconds) {
  const int ranks = maniple::get_world_size();
  const bool even = std::has_single_bit(static_cast<unsigned>(ranks));
  const int total = even ? 4 * ranks : static_cast<int>(std::bit_ceil(2 * static_cast<unsigned>(ranks)));
  const int most = maniple::VirtualRanks::of(total, 0, ranks).count;
  std::vector<std::unique_ptr<Contest>> all;
  const auto add = [&](const std::string& name, int accumulate, int virtual_ranks) {
    all.push_back(std::make_unique<Contest>(name, model, accumulate, virtual_ranks));
  };
  add("DDP", 1, 0);
  add("V = " + std::to_string(ranks), 1, ranks);
  add("DDP, accumulate " + std::to_string(most), most, 0);
  add("V = " + std::to_string(total), 1, total);
  for (auto& one : all) one->run_block(), one->times.clear(), one->cpu_times.clear();
  const double begin = now();
  while (longest(now() - begin) < seconds) {
    for (auto& one : all) one->run_block();
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double ms = median(all[i]->times), plain = median(all[i / 2 * 2]->times);
    const double cpu = median(all[i]->cpu_times), plain_cpu = median(all[i / 2 * 2]->cpu_times);
    char line[300];
    std::snprintf(line, sizeof line, "%-6s %-18s %9.2f ms a step %8.3f   CPU %9.2f ms %8.3f", model.c_str(),
                  all[i]->name.c_str(), ms, ms / plain, cpu, cpu / plain_cpu);
    maniple::print_once(line);
    std::snprintf(line, sizeof line,
                  R"({"kind": "elastic", "model": "%s", "name": "%s", "ranks": %d, "step_ms": %.3f, "ratio": %.4f, )"
                  R"("cpu_ms": %.3f, "cpu_ratio": %.4f})",
                  model.c_str(), all[i]->name.c_str(), ranks, ms, ms / plain, cpu, cpu / plain_cpu);
    maniple::print_once(line);
  }
}

void measure(int, double seconds) {
  torch::set_num_threads(1);
  maniple::init_process_group();
  maniple::print_once(maniple::get_world_size(), " ranks; the ratio is the time relative to the DDP row above");
  for (const char* model : {"cnn", "mlp"}) measure_model(model, seconds / 2);
  maniple::barrier();
  maniple::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: elastic_worker RANKS SECONDS; `maniple bench elastic` starts it\n");
    return 2;
  }
  try {
    maniple::spawn(measure, {.nprocs = std::atoi(argv[1])}, std::atof(argv[2]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
