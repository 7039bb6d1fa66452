#include <unistd.h>
#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <set>

#include "comm/backend/backend.h"
#include "comm/base/check.h"
#include "comm/base/own_variables.h"
#include "comm/group/environment_check.h"
#include "launch/process/rank_environment.h"
#include "tools/bench/ddp_bench.h"
#include "tools/bench/elastic_bench.h"
#include "tools/bench/gpu_bench.h"
#include "tools/bench/report.h"
#include "tools/bench/runner.h"
#include "tools/bench/system.h"
#include "tools/bench/work_item.h"
#include "tools/cli/command.h"
#include "tools/cli/option_checks.h"

namespace maniple::cli {
namespace {

using namespace maniple::bench;

constexpr double kDdpBudgets = 20;  // budgets per kind of training step, because steps are long

/// The command line before interpretation; BenchRequest holds the interpreted options.
struct BenchArguments {
  std::vector<std::string> operations;
  std::string ranks = "2", sizes = "4,1K,64K,1M,16M,64M,256M", dtypes = "float32", reduce = "sum", buffer = "both";
  std::string transports = "auto", algorithms, systems, backends;
  int iterations = 0, warmup = -1, hosts = 1, busy = 0, repeat = 0;
  double budget_ms = 250, timeout_s = 300;
  std::string link, json, csv;
  bool peers = false, list = false, no_limit = false, rewrite = false;
  std::string models;
  bool torch = true;
  std::string only;
};

bool are_sizes(const std::string& text) {
  try {
    return !parse_sizes(text).empty();
  } catch (const InvalidArgument&) {
    return false;
  }
}

std::vector<int> parse_ranks(const std::string& text) {
  std::vector<int> ranks;
  for (const std::string& part : split_list(text)) {
    const bool number = part.find_first_not_of("0123456789") == std::string::npos && part.size() < 6;
    MANIPLE_REQUIRE(number, "--ranks is \"{}\"; expected numbers such as 2,4", text);
    ranks.push_back(std::stoi(part));
  }
  MANIPLE_REQUIRE(!ranks.empty(), "--ranks is empty; expected numbers such as 2,4");
  return ranks;
}

std::vector<std::string> systems_of(const BenchArguments& arguments) {
  if (!arguments.systems.empty()) {
    const std::vector<std::string> names = split_list(arguments.systems);
    for (const std::string& name : names) system_named(name);
    return names;
  }
  std::vector<std::string> names = {"native"};
  if (!arguments.backends.empty()) {
    names.clear();
    for (const std::string& backend : split_list(arguments.backends)) {
      find_backend(backend);  // throws if the backend is unavailable
      names.push_back(system_named(system_of_backend(backend)).name());
    }
  }
  for (const auto& system : systems()) {
    if (system->role() == bench::Role::limit && !arguments.no_limit) names.push_back(system->name());
    if (system->role() == bench::Role::peer && arguments.peers) names.push_back(system->name());
  }
  return names;
}

BenchRequest request_of(const BenchArguments& arguments) {
  BenchRequest request;
  for (const std::string& name : arguments.operations) {
    if (name != "all") {
      request.operations.push_back(name);
      continue;
    }
    for (const Op op : measured_operations()) request.operations.emplace_back(to_string(op));
  }
  request.ranks = parse_ranks(arguments.ranks);
  request.sizes = parse_sizes(arguments.sizes);
  request.dtypes = split_list(arguments.dtypes);
  request.reduce = arguments.reduce;
  if (arguments.buffer != "both") request.buffers = split_list(arguments.buffer);
  request.transports = split_list(arguments.transports);
  if (!arguments.algorithms.empty()) request.algorithms = split_list(arguments.algorithms);
  request.iterations = arguments.iterations;
  request.warmup = arguments.warmup;
  request.budget_s = arguments.budget_ms / 1e3;
  request.timeout_s = arguments.timeout_s;
  request.hosts = arguments.hosts;
  request.link = arguments.link;
  request.busy = arguments.busy;
  request.rewrite = arguments.rewrite;
  request.systems = systems_of(arguments);
  request.repeat = arguments.repeat > 0 ? arguments.repeat : arguments.peers || !arguments.backends.empty() ? 3 : 1;
  return request;
}

/// A terminal line that names the current measurement and is erased afterwards.
class ProgressLine {
 public:
  void show(const std::string& text) {
    if (visible_) fmt::print(stderr, "\r\033[K  measuring {}", text);
    shown_ = visible_;
  }
  void clear() {
    if (shown_) fmt::print(stderr, "\r\033[K");
    shown_ = false;
  }

 private:
  bool visible_ = isatty(STDERR_FILENO) == 1;
  bool shown_ = false;
};

void print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

/// Prints rows at once if each is measured only once; otherwise the whole table at the end, with its ratios.
std::vector<Row> measure_all(Runner& runner, ProgressLine& progress, const std::vector<Block>& blocks, bool limits,
                             const std::vector<std::uint64_t>& sizes, double budget_s) {
  const bool at_once = std::all_of(blocks.begin(), blocks.end(), [](const Block& block) {
    return block.repeat == 1 && std::none_of(block.systems.begin(), block.systems.end(), [](const std::string& name) {
             return system_named(name).role() == bench::Role::peer || system_named(name).role() == bench::Role::plugin;
           });
  });
  std::vector<Row> rows;
  TableWriter writer(false);
  const auto show = [&](const Row& row) {
    progress.clear();
    print(writer.next(row));
  };
  if (at_once) print(writer.header());
  if (limits) {
    rows = runner.core_limits(sizes, std::min(budget_s, 0.1));
    if (at_once) std::for_each(rows.begin(), rows.end(), show);
  }
  for (const Block& block : blocks) {
    for (Row& row : runner.run(block, at_once ? std::function<void(const Row&)>(show) : nullptr))
      rows.push_back(std::move(row));
  }
  progress.clear();
  if (!at_once) print(table(rows));
  return rows;
}

/// The sizes at which one core's copying and adding is measured: at most one cache-resident and one memory-resident.
std::vector<std::uint64_t> core_sizes(const std::vector<std::uint64_t>& sizes) {
  std::vector<std::uint64_t> result;
  for (const std::uint64_t size : {std::uint64_t{1} << 20, std::uint64_t{64} << 20}) {
    const bool covered = std::any_of(sizes.begin(), sizes.end(), [&](std::uint64_t asked) { return asked >= size; });
    if (covered || result.empty()) result.push_back(size);
  }
  return result;
}

/// Measures training instead of operations.
int measure_ddp(const BenchArguments& arguments, const SignalWatch& watch, ProgressLine& progress) {
  DdpRequest request;
  if (!arguments.models.empty()) request.models = split_list(arguments.models);
  request.ranks = parse_ranks(arguments.ranks);
  request.iterations = arguments.iterations;
  request.seconds = arguments.budget_ms / 1e3 * kDdpBudgets;
  request.timeout_s = arguments.timeout_s;
  request.repeat = arguments.repeat;
  request.torch = arguments.torch;
  ScratchDirectory scratch;
  const Testbed testbed = Testbed::here(scratch);
  DdpBench bench(testbed, watch, [&](const std::string& text) { progress.show(text); });
  print(ddp_table_header());
  const std::vector<DdpRow> rows = bench.run(request, [&](const DdpRow& row) {
    progress.clear();
    print(ddp_table_line(row));
  });
  progress.clear();
  for (const std::string& warning : bench.warnings()) fmt::print(stderr, "maniple: {}\n", warning);
  if (!arguments.json.empty()) write_file(arguments.json, ddp_report_text(this_machine(), rows));
  return bench.failed() ? kFailed : 0;
}

using RowSink = ElasticBench::RowSink;
using MoreRows = std::function<void(const Testbed&, const RowSink&)>;

/// Measures parts of a training: a LibTorch program measures Maniple and its competitors in turn, and prints the table.
/// `more` measures further rows.
int measure_by_worker(const BenchArguments& arguments, const SignalWatch& watch, const std::string& program,
                      std::vector<std::string> own_arguments, const MoreRows& more = nullptr) {
  ScratchDirectory scratch;
  const Testbed testbed = Testbed::here(scratch);
  const std::string worker = testbed.libexec + "/" + program;
  if (access(worker.c_str(), X_OK) != 0) {
    throw Unsupported(fmt::format(
        "this build has no {}: it was made without LibTorch (Debian: apt-get install libtorch-dev, then build again)",
        worker));
  }
  ChildSpec spec;
  spec.name = program;
  spec.argv = std::move(own_arguments);
  spec.argv.insert(spec.argv.begin(), worker);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  const auto on_line = [&](std::string_view line) {
    if (line.starts_with('{')) {
      rows.push_back(nlohmann::ordered_json::parse(line));
    } else {
      print(std::string(line) + "\n");
    }
  };
  run_process_set({spec}, on_line, Deadline::after(Seconds(arguments.timeout_s)), watch);
  if (more) {
    more(testbed, [&](const std::string& line, const nlohmann::ordered_json& row) {
      print(line + "\n");
      rows.push_back(row);
    });
  }
  if (!arguments.json.empty()) write_file(arguments.json, report_text(this_machine(), rows));
  return 0;
}

/// Measures ranks on a GPU.
int measure_gpu(const BenchArguments& arguments, const SignalWatch& watch, ProgressLine& progress) {
  if (arguments.list) {
    for (const GpuMeasurement& one : gpu_measurements())
      print(fmt::format("{}{}\n", one.name(), one.by_default ? "" : "   (only with --only)"));
    return 0;
  }
  const std::vector<GpuMeasurement> list = picked_measurements(arguments.only);
  ScratchDirectory scratch;
  const Testbed testbed = Testbed::here(scratch);
  GpuBench bench(testbed, watch, [&](const std::string& text) { progress.show(text); });
  bool begun = false;
  const auto start = std::chrono::steady_clock::now();
  const std::vector<GpuRow> rows = bench.run(list, [&](const GpuRow& row, const std::vector<GpuRow>& so_far) {
    progress.clear();
    if (!begun) print(gpu_table_header());
    begun = true;
    print(gpu_table_line(row, so_far));
  });
  progress.clear();
  print(gpu_goals_table(gpu_goals(rows)));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  print(fmt::format("{} measurements in {:.0f} s on {}\n", list.size(), seconds,
                    bench.gpu().empty() ? "a GPU" : bench.gpu()));
  for (const std::string& error : bench.errors()) fmt::print(stderr, "maniple: {}\n", error);
  if (!arguments.json.empty()) write_file(arguments.json, gpu_report_text(this_machine(), bench.gpu(), rows));
  return bench.failed() ? kFailed : 0;
}

/// Checks the output files before minutes are spent on results that could not be written.
void check_output(const BenchArguments& arguments) {
  for (const std::string& path : {arguments.json, arguments.csv}) {
    if (!path.empty()) require_writable(path);
  }
}

int measure_and_report(const BenchArguments& arguments) {
  // Warn once here, not in every measured group of ranks.
  warn_of_unknown_variables_for_children(launch::own_environment());
  require_good_knobs(environment_text);
  check_output(arguments);
  static const std::set<std::string> kTraining = {"ddp",     "optim", "sharded",     "elastic",
                                                  "weights", "data",  "activations", "gpu"};
  for (const std::string& name : arguments.operations) {
    MANIPLE_REQUIRE(arguments.busy == 0 || !kTraining.contains(name),
                    "--busy is for operations such as all_reduce; `{}` is measured without it", name);
    MANIPLE_REQUIRE(!arguments.rewrite || !kTraining.contains(name),
                    "--rewrite is for operations such as all_reduce; `{}` is measured without it", name);
  }
  const SignalWatch watch;
  ProgressLine progress;
  if (arguments.operations == std::vector<std::string>{"ddp"}) return measure_ddp(arguments, watch, progress);
  if (arguments.operations.size() == 1) {
    const std::string& kind = arguments.operations.front();
    const std::string seconds = std::to_string(arguments.budget_ms / 1e3 * kDdpBudgets);
    const std::string& models = arguments.models;
    if (kind == "optim")
      return measure_by_worker(arguments, watch, "optim_worker", {models.empty() ? "small,large" : models, seconds});
    const int ranks = parse_ranks(arguments.ranks).front();
    if (kind == "sharded" || kind == "elastic") {
      const auto faults = [&](const Testbed& testbed, const RowSink& on_row) {
        ElasticBench(testbed, watch, arguments.timeout_s, on_row).run(ranks, std::stod(seconds) / 2);
      };
      return measure_by_worker(arguments, watch, kind + "_worker", {std::to_string(ranks), seconds},
                               kind == "elastic" ? MoreRows(faults) : MoreRows());
    }
    if (kind == "weights")
      return measure_by_worker(arguments, watch, "train_worker", {kind, seconds, models.empty() ? "2G" : models});
    if (kind == "data" || kind == "activations")
      return measure_by_worker(arguments, watch, "train_worker", {kind, seconds});
  }
  if (arguments.operations == std::vector<std::string>{"gpu"}) return measure_gpu(arguments, watch, progress);
  Runner runner(watch, [&](const std::string& text) { progress.show(text); });
  if (arguments.list) {
    print(listing(runner.testbed()));
    return 0;
  }
  MANIPLE_REQUIRE(!arguments.operations.empty(),
                  "no operation given; try `maniple bench all_reduce`, or --list to see what there is");
  const std::vector<Block> blocks = plan_blocks(request_of(arguments));
  const std::vector<Row> rows = measure_all(runner, progress, blocks, !arguments.no_limit,
                                            core_sizes(parse_sizes(arguments.sizes)), arguments.budget_ms / 1e3);
  for (const std::string& warning : runner.warnings()) fmt::print(stderr, "maniple: {}\n", warning);
  if (!arguments.json.empty()) write_file(arguments.json, report_text(this_machine(), rows));
  if (!arguments.csv.empty()) write_file(arguments.csv, csv_text(rows));
  const bool wrong = std::any_of(rows.begin(), rows.end(), [](const Row& row) { return !row.error.empty(); });
  return wrong || runner.failed() ? kFailed : 0;
}

}  // namespace

std::function<int()> declare_bench(CLI::App& app) {
  auto arguments = std::make_shared<BenchArguments>();
  app.add_option("operations", arguments->operations,
                 "operations to measure, or `all`; `ddp`: training; `optim`, `sharded`, `elastic`, `data`, "
                 "`weights`, `activations`: parts of training; `gpu`: ranks on a GPU");
  app.add_flag("--list", arguments->list, "show operations, transports, algorithms and systems");

  const char* what = "What to measure";
  app.add_option("--ranks", arguments->ranks, "number of ranks, or a list: 2,4,8")->capture_default_str()->group(what);
  takes(app.add_option("--sizes", arguments->sizes,
                       "buffer sizes in bytes: a list such as 4,1K,64K, or a range in steps of x4: 4..256M")
            ->capture_default_str()
            ->group(what),
        "bytes such as 4, 64K, 16M or 1G, a list of them, or a range such as 4..256M", are_sizes);
  app.add_option("--dtype", arguments->dtypes, "element types, separated by commas")
      ->capture_default_str()
      ->group(what);
  app.add_option("--op", arguments->reduce, "reduce op")->capture_default_str()->group(what);
  app.add_option("--buffer", arguments->buffer, "registered, ordinary or both")->capture_default_str()->group(what);
  app.add_option("--transport", arguments->transports, "auto, shm, tcp, loopback, or a list")
      ->capture_default_str()
      ->group(what);
  app.add_option("--algorithm", arguments->algorithms, "force these algorithms (names: --list)")->group(what);
  takes_whole_number(
      app.add_option("--hosts", arguments->hosts, "spread the ranks over this many virtual hosts (needs root)")
          ->capture_default_str()
          ->group(what),
      1);
  app.add_option("--link", arguments->link, "limit each host's link to this rate, such as 1gbit")->group(what);
  app.add_flag("--rewrite", arguments->rewrite,
               "write the inputs before each call (untimed), as a program that computes them would")
      ->group(what);
  takes_whole_number(app.add_option("--busy", arguments->busy,
                                    "run this many extra processes that compete with the ranks for the cores")
                         ->capture_default_str()
                         ->group(what),
                     0, kMaxRanks);

  const char* with = "What to compare with";
  app.add_flag("--peers", arguments->peers, "also measure the installed peers, in turn with Maniple")->group(with);
  app.add_option("--systems", arguments->systems,
                 "measure exactly these systems, such as native,openmpi (names: --list)")
      ->group(with);
  app.add_option("--backends", arguments->backends,
                 "measure Maniple with each of these backends, in turn: native,mpi,gloo")
      ->group(with);
  app.add_flag("--no-limit", arguments->no_limit, "do not measure this machine's limits")->group(with);

  const char* training = "Training (`maniple bench ddp`, `optim`, `data`, `weights`, `activations`)";
  app.add_option(
         "--models", arguments->models,
         "a list of models for ddp: mnist_cnn, mlp25m, gpt5m, tiny50; for optim: small, large; for weights: sizes "
         "such as 64M, 2G; default: all (weights: 2G)")
      ->group(training);
  app.add_flag("--torch,!--no-torch", arguments->torch, "also measure PyTorch's DDP on Gloo if PyTorch is installed")
      ->group(training);

  app.add_option("--only", arguments->only,
                 "only measurements whose names contain PATTERN, with * and ? as in a shell (names: gpu --list)")
      ->type_name("PATTERN")
      ->group("GPUs (`maniple bench gpu`)");

  const char* how = "How to measure";
  takes_whole_number(
      app.add_option("--iterations", arguments->iterations, "timed calls per row; 0: as the time budget allows")
          ->capture_default_str()
          ->group(how),
      0);
  takes_whole_number(
      app.add_option("--warmup", arguments->warmup, "calls before the timed ones; -1: calls for about 20 ms")
          ->capture_default_str()
          ->group(how),
      -1);
  takes_number(app.add_option("--budget", arguments->budget_ms, "milliseconds of timed calls per row")
                   ->capture_default_str()
                   ->group(how),
               0.001);
  takes_whole_number(app.add_option("--repeat", arguments->repeat,
                                    "runs per system; the table shows their median (default: 3 with peers, else 1)")
                         ->group(how),
                     1);
  takes_seconds(
      app.add_option("--timeout", arguments->timeout_s, "seconds after which a system's run is ended as stuck")
          ->capture_default_str()
          ->group(how),
      0.001);

  const char* output = "Output";
  app.add_option("--json", arguments->json, "write the rows to this file (bench/plot.py draws them)")->group(output);
  app.add_option("--csv", arguments->csv, "write the rows to this file as comma-separated values")->group(output);
  return [arguments] {
    try {
      return measure_and_report(*arguments);
    } catch (const Interrupted&) {
      fmt::print(stderr, "\nmaniple: interrupted; all started processes have been ended\n");
      return kInterrupted;
    }
  };
}

/// Internal: one rank of a measurement, or a process of --busy, started by `maniple bench`.
std::function<int()> declare_bench_worker(CLI::App& app) {
  struct WorkerArguments {
    std::string item;
    int rank = 0;
    std::string rendezvous;
    bool spin = false;
  };
  auto arguments = std::make_shared<WorkerArguments>();
  app.add_option("work_item", arguments->item);
  app.add_option("rank", arguments->rank);
  app.add_option("rendezvous", arguments->rendezvous);
  app.add_flag("--spin", arguments->spin);
  return [arguments] {
    for (volatile std::uint64_t turns = 0; arguments->spin;) turns = turns + 1;  // --busy: spins until it is killed
    bench::run_worker(bench::parse_work_item(arguments->item), arguments->rank, arguments->rendezvous);
    return 0;
  };
}

}  // namespace maniple::cli
