#include <unistd.h>
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "backend/backend.h"
#include "base/check.h"
#include "base/own_variables.h"
#include "bench/campaign.h"
#include "bench/ddp_bench.h"
#include "bench/goals.h"
#include "bench/listing.h"
#include "bench/plot.h"
#include "bench/report.h"
#include "bench/runner.h"
#include "bench/sizes.h"
#include "bench/table.h"
#include "cli/command.h"
#include "group/environment_check.h"
#include "launch/coordinate/job_settings.h"

namespace maniple::cli {
namespace {

using namespace maniple::bench;

constexpr double kDdpBudgets = 20;  // a training step is long: each kind of step gets so many budgets

/// The command line as it was typed; what it means is in Wishes.
struct Typed {
  std::vector<std::string> operations;
  std::string ranks = "2", sizes = "4,1K,64K,1M,16M,64M,256M", dtypes = "float32", reduce = "sum", buffer = "both";
  std::string transports = "auto", algorithms, systems, backends;
  int iterations = 0, warmup = -1, hosts = 1, repeat = 0;
  double budget_ms = 250, timeout_s = 300;
  std::string link, json, plot;
  bool peers = false, list = false, no_limit = false;
  std::string models;
  bool torch = true;
};

/// CLI11's own text for it spells out the largest number there is.
CLI::Validator at_least(double least) {
  return {[least](std::string& text) -> std::string {
            double value = 0;
            if (CLI::detail::lexical_cast(text, value) && value >= least) return {};
            return fmt::format("{} is too small; expected {} or more", text, least);
          },
          "", "at_least"};
}

std::vector<int> parse_ranks(const std::string& text) {
  std::vector<int> ranks;
  for (const std::string& part : split_list(text)) {
    const bool number = part.find_first_not_of("0123456789") == std::string::npos && part.size() < 6;
    MANIPLE_REQUIRE(number, "--ranks holds \"{}\"; expected numbers such as 2,4", part);
    ranks.push_back(std::stoi(part));
  }
  MANIPLE_REQUIRE(!ranks.empty(), "--ranks is empty; expected numbers such as 2,4");
  return ranks;
}

std::vector<std::string> systems_of(const Typed& typed) {
  if (!typed.systems.empty()) {
    const std::vector<std::string> names = split_list(typed.systems);
    for (const std::string& name : names) system_named(name);
    return names;
  }
  std::vector<std::string> names = {"native"};
  if (!typed.backends.empty()) {
    names.clear();
    for (const std::string& backend : split_list(typed.backends)) {
      find_backend(backend);  // says what is missing
      names.push_back(system_named(system_of_backend(backend)).name());
    }
  }
  for (const auto& system : systems()) {
    if (system->role() == bench::Role::limit && !typed.no_limit) names.push_back(system->name());
    if (system->role() == bench::Role::peer && typed.peers) names.push_back(system->name());
  }
  return names;
}

Wishes wishes_of(const Typed& typed) {
  Wishes wishes;
  for (const std::string& name : typed.operations) {
    if (name != "all") {
      wishes.operations.push_back(name);
      continue;
    }
    for (const Op op : measured_operations()) wishes.operations.emplace_back(to_string(op));
  }
  wishes.ranks = parse_ranks(typed.ranks);
  wishes.sizes = parse_sizes(typed.sizes);
  wishes.dtypes = split_list(typed.dtypes);
  wishes.reduce = typed.reduce;
  if (typed.buffer != "both") wishes.buffers = split_list(typed.buffer);
  wishes.transports = split_list(typed.transports);
  if (!typed.algorithms.empty()) wishes.algorithms = split_list(typed.algorithms);
  wishes.iterations = typed.iterations;
  wishes.warmup = typed.warmup;
  wishes.budget_s = typed.budget_ms / 1e3;
  wishes.timeout_s = typed.timeout_s;
  wishes.hosts = typed.hosts;
  wishes.link = typed.link;
  wishes.systems = systems_of(typed);
  wishes.repeat = typed.repeat > 0 ? typed.repeat : typed.peers || !typed.backends.empty() ? 3 : 1;
  return wishes;
}

/// One line on a terminal that tells what is being measured and goes away again.
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

/// Rows as they come when each is measured once; otherwise the whole table at the end, with its ratios.
std::vector<Row> measure_all(Runner& runner, ProgressLine& progress, const std::vector<Block>& blocks, bool limits,
                             const std::vector<std::uint64_t>& sizes, double budget_s) {
  const bool at_once = std::all_of(blocks.begin(), blocks.end(), [](const Block& block) {
    return block.repeat == 1 && std::none_of(block.systems.begin(), block.systems.end(), [](const std::string& name) {
             return system_named(name).role() == bench::Role::peer || system_named(name).role() == bench::Role::engine;
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

/// Sizes at which one core's copying and adding says something: a cache-resident and a memory-resident one at most.
std::vector<std::uint64_t> core_sizes(const std::vector<std::uint64_t>& sizes) {
  std::vector<std::uint64_t> result;
  for (const std::uint64_t size : {std::uint64_t{1} << 20, std::uint64_t{64} << 20}) {
    const bool covered = std::any_of(sizes.begin(), sizes.end(), [&](std::uint64_t wanted) { return wanted >= size; });
    if (covered || result.empty()) result.push_back(size);
  }
  return result;
}

int print_goals(const std::vector<Row>& rows) {
  print("\n");
  bool all = true;
  for (const Goal& goal : goals()) {
    const Verdict verdict = judge(goal, rows);
    all = all && verdict.reached;
    print(verdict_line(goal, verdict) + "\n");
  }
  return all ? 0 : kGoalsMissed;
}

/// Training instead of operations.
int measure_ddp(const Typed& typed, const InterruptWatch& watch, ProgressLine& progress) {
  DdpWishes wishes;
  if (!typed.models.empty()) wishes.models = split_list(typed.models);
  wishes.ranks = parse_ranks(typed.ranks);
  wishes.iterations = typed.iterations;
  wishes.seconds = typed.budget_ms / 1e3 * kDdpBudgets;
  wishes.timeout_s = typed.timeout_s;
  wishes.repeat = typed.repeat;
  wishes.torch = typed.torch;
  ScratchDirectory scratch;
  const Site site = Site::here(scratch);
  DdpBench bench(site, watch, [&](const std::string& text) { progress.show(text); });
  print(ddp_table_header());
  const std::vector<DdpRow> rows = bench.run(wishes, [&](const DdpRow& row) {
    progress.clear();
    print(ddp_table_line(row));
  });
  progress.clear();
  for (const std::string& complaint : bench.complaints()) fmt::print(stderr, "maniple: {}\n", complaint);
  if (!typed.json.empty()) write_file(typed.json, ddp_report_text(this_machine(), rows));
  return bench.failed() ? kFailed : 0;
}

/// Before minutes are spent on what could not be kept.
void check_output(const Typed& typed) {
  const std::string& plot = typed.plot;
  MANIPLE_REQUIRE(plot.empty() || plot.ends_with(".svg"), "--plot is \"{}\"; expected a name that ends in .svg", plot);
  for (const std::string& path : {typed.json, plot}) {
    if (!path.empty()) require_writable(path);
  }
}

int measure_and_report(const Typed& typed) {
  // Once, and not by every group of ranks that is measured.
  warn_of_unknown_variables_for_children(launch::own_environment());
  require_good_knobs(environment_text);
  check_output(typed);
  const InterruptWatch watch;
  ProgressLine progress;
  if (typed.operations == std::vector<std::string>{"ddp"}) return measure_ddp(typed, watch, progress);
  Runner runner(watch, [&](const std::string& text) { progress.show(text); });
  if (typed.list) {
    print(listing(runner.site()));
    return 0;
  }
  MANIPLE_REQUIRE(!typed.operations.empty(),
                  "no operation given; try `maniple bench all_reduce`, or --list to see what there is");
  const bool figures = typed.operations == std::vector<std::string>{"figures"};
  const std::vector<Block> blocks =
      figures ? figure_blocks(split_list(typed.systems), typed.repeat > 0 ? typed.repeat : 3, typed.budget_ms / 1e3)
              : plan(wishes_of(typed));
  const auto sizes = figures ? std::vector<std::uint64_t>{1 << 20, 64 << 20} : core_sizes(parse_sizes(typed.sizes));
  const std::vector<Row> rows = measure_all(runner, progress, blocks, !typed.no_limit, sizes, typed.budget_ms / 1e3);

  for (const std::string& complaint : runner.complaints()) fmt::print(stderr, "maniple: {}\n", complaint);
  if (!typed.json.empty()) write_file(typed.json, report_text(this_machine(), rows));
  if (!typed.plot.empty()) write_file(typed.plot, plot_svg(this_machine(), rows));
  const bool wrong = std::any_of(rows.begin(), rows.end(), [](const Row& row) { return !row.error.empty(); });
  const int verdict = figures ? print_goals(rows) : 0;
  return wrong || runner.failed() ? kFailed : verdict;
}

}  // namespace

std::function<int()> declare_bench(CLI::App& app) {
  auto typed = std::make_shared<Typed>();
  app.add_option("operations", typed->operations,
                 "operations to measure; `all`: every one; `figures`: the project's goals against the peers; `ddp`: "
                 "training");
  app.add_flag("--list", typed->list, "show operations, transports, algorithms and systems");

  const char* what = "What to measure";
  app.add_option("--ranks", typed->ranks, "number of ranks, or a list: 2,4,8")->capture_default_str()->group(what);
  app.add_option("--sizes", typed->sizes, "bytes of the whole buffer: 4,1K,64K or a range by x4: 4..256M")
      ->capture_default_str()
      ->group(what);
  app.add_option("--dtype", typed->dtypes, "element types, a list")->capture_default_str()->group(what);
  app.add_option("--op", typed->reduce, "reduce op")->capture_default_str()->group(what);
  app.add_option("--buffer", typed->buffer, "registered, ordinary or both")->capture_default_str()->group(what);
  app.add_option("--transport", typed->transports, "auto, shm, tcp, loopback, or a list")
      ->capture_default_str()
      ->group(what);
  app.add_option("--algorithm", typed->algorithms, "force algorithms, by the names of --list")->group(what);
  app.add_option("--hosts", typed->hosts, "spread the ranks over this many virtual hosts (needs root)")
      ->capture_default_str()
      ->group(what);
  app.add_option("--link", typed->link, "shape each host's link to this rate: 1gbit")->group(what);

  const char* with = "What to compare with";
  app.add_flag("--peers", typed->peers, "measure the installed peers in turn with us")->group(with);
  app.add_option("--systems", typed->systems, "exactly these, by the names of --list: native,openmpi")->group(with);
  app.add_option("--backends", typed->backends, "Maniple itself with each of these backends, in turn: native,mpi,gloo")
      ->group(with);
  app.add_flag("--no-limit", typed->no_limit, "leave out the limits of this machine")->group(with);

  const char* training = "Training (`maniple bench ddp`)";
  app.add_option("--models", typed->models, "mnist_cnn, mlp25m, gpt5m, tiny50, or a list; default: all")
      ->group(training);
  app.add_flag("--torch,!--no-torch", typed->torch, "measure PyTorch's DDP on Gloo too, where it is installed")
      ->group(training);

  const char* how = "How to measure";
  app.add_option("--iterations", typed->iterations, "timed calls of a row; 0: as many as fit the budget")
      ->capture_default_str()
      ->check(at_least(0))
      ->group(how);
  app.add_option("--warmup", typed->warmup, "calls before the timed ones; -1: about 20 ms")
      ->capture_default_str()
      ->check(at_least(-1))
      ->group(how);
  app.add_option("--budget", typed->budget_ms, "milliseconds of timed calls of a row")
      ->capture_default_str()
      ->check(at_least(0.001))
      ->group(how);
  app.add_option("--repeat", typed->repeat,
                 "repetitions of every turn; the median counts (default: 3 with peers, else 1)")
      ->check(at_least(1))
      ->group(how);
  app.add_option("--timeout", typed->timeout_s, "seconds after which one system's run counts as stuck")
      ->capture_default_str()
      ->check(at_least(0.001))
      ->group(how);

  const char* output = "Output";
  app.add_option("--json", typed->json, "write the rows to this file")->group(output);
  app.add_option("--plot", typed->plot, "write a chart to this .svg file")->group(output);
  return [typed] {
    try {
      return measure_and_report(*typed);
    } catch (const Interrupted&) {
      fmt::print(stderr, "\nmaniple: interrupted; everything started has been ended\n");
      return kInterrupted;
    }
  };
}

}  // namespace maniple::cli
