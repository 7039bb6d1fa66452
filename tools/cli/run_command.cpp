// `maniple run`: starts a job. Parses the options; src/launch/ implements them.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/base/check.h"
#include "comm/base/own_variables.h"
#include "launch/launch_options.h"
#include "launch/placement/binding.h"
#include "launch/process/program.h"
#include "launch/process/rank_environment.h"
#include "tools/cli/command.h"
#include "tools/cli/option_checks.h"
#include "tools/cli/outer_launcher.h"

namespace maniple::cli {
namespace {

using namespace maniple::launch;

/// The options, and what must be read together before it becomes an option.
struct RunArguments {
  std::string processes;
  int devices_per_node = 0;  // 0: not given
  int devices_per_process = 0;
  std::string nodes = "1";
  int node_rank = -1;
  std::string master, master_addr;
  int master_port = -1;
  std::string hosts, hostfile;
  std::string elastic;
  bool explain = false, standalone = false;
  std::string ignored;
  std::vector<std::string> environment;
  LaunchOptions options;
};

int process_count(const RunArguments& arguments, int gpus) {
  return parse_process_count(arguments.processes, gpus, allowed_cpu_count(), as_typed("--nproc-per-node"));
}

void read_devices(const RunArguments& arguments, LaunchOptions& options) {
  Environment own;
  if (const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES"))
    own.push_back(std::string("CUDA_VISIBLE_DEVICES=") + chosen);
  const int gpus = static_cast<int>(visible_devices(own).size());
  // With --devices-per-process, -n alone is the number of devices per node, as in the manual's arithmetic.
  const int devices = arguments.devices_per_node > 0 ? arguments.devices_per_node : gpus;
  if (arguments.devices_per_process > 0) {
    if (arguments.processes.empty() || arguments.devices_per_node > 0) {
      MANIPLE_REQUIRE(devices > 0, "--devices-per-process {} needs --devices-per-node, as no GPU is seen here",
                      arguments.devices_per_process);
      options.processes = processes_for(devices, arguments.devices_per_process);
      if (!arguments.processes.empty()) {
        const int wanted = process_count(arguments, gpus);
        MANIPLE_REQUIRE(wanted == options.processes,
                        "{} is {}, but {} devices per node with {} devices per process make {} processes",
                        as_typed("--nproc-per-node"), wanted, devices, arguments.devices_per_process,
                        options.processes);
      }
    } else {
      options.processes = process_count(arguments, gpus);
    }
    options.devices_per_process = arguments.devices_per_process;
    return;
  }
  if (!arguments.processes.empty()) {
    options.processes = process_count(arguments, gpus);
  } else if (arguments.devices_per_node > 0) {
    options.processes = arguments.devices_per_node;
  }
  const int available = arguments.devices_per_node > 0 ? arguments.devices_per_node : gpus;
  if (available >= options.processes && available > 0) {
    options.devices_per_process = available % options.processes == 0 ? available / options.processes : 1;
  }
}

void read_nodes(const RunArguments& arguments, LaunchOptions& options) {
  options.nodes = parse_node_range(arguments.nodes);
  if (!arguments.elastic.empty()) {
    const NodeRange range = parse_elastic_range(arguments.elastic);
    options.elastic = {.min = range.min, .max = range.max};
  }
  options.node_rank = arguments.node_rank;
  MANIPLE_REQUIRE(arguments.master.empty() || arguments.master_addr.empty(),
                  "--master and --master-addr say the same: give one");
  if (!arguments.master.empty()) options.master = parse_master(arguments.master, as_typed("--master"));
  if (!arguments.master_addr.empty()) {
    const bool bare_v6 =
        arguments.master_addr.find(':') != arguments.master_addr.rfind(':') && arguments.master_addr.front() != '[';
    options.master =
        parse_master(bare_v6 ? "[" + arguments.master_addr + "]" : arguments.master_addr, as_typed("--master-addr"));
  }
  if (arguments.master_port != -1) {
    if (!options.master) options.master = MasterAddress{.host = "127.0.0.1", .port = 0};
    options.master->port = static_cast<std::uint16_t>(arguments.master_port);
  }
  MANIPLE_REQUIRE(!options.master || options.nodes.max == 1 || options.master->port != 0,
                  "--master needs a port that all nodes know; 0 means any");
  MANIPLE_REQUIRE(arguments.hosts.empty() || arguments.hostfile.empty(),
                  "--hosts and --hostfile say the same: give one");
  if (!arguments.hosts.empty()) options.hosts = parse_hosts(arguments.hosts);
  if (!arguments.hostfile.empty()) options.hosts = read_hostfile(arguments.hostfile);
  if (!options.hosts.empty()) {
    const int count = static_cast<int>(options.hosts.size());
    MANIPLE_REQUIRE(arguments.nodes == "1" || (options.nodes.min <= count && options.nodes.max >= count),
                    "--nnodes is {}, but {} hosts are named", arguments.nodes, count);
    MANIPLE_REQUIRE(!options.master && arguments.node_rank < 0,
                    "with --hosts there is no need of --master and --node-rank");
    options.nodes = {.min = count, .max = count};
  }
}

/// Nodes whose launchers are started by hand may have different numbers of processes, so any rank is then possible.
void check_only_ranks(const LaunchOptions& options) {
  const bool known = !options.hosts.empty() || options.nodes.max == 1;
  const int size =
      known ? static_cast<int>(plan_ranks(planned_nodes(options)).size()) : kMaxNodes * kMaxProcessesPerNode;
  for (const int rank : options.only_ranks) {
    MANIPLE_REQUIRE(rank >= 0 && rank < size, "--only-rank is {}; expected 0 to {}, as the job has {} ranks", rank,
                    size - 1, size);
  }
}

int run(RunArguments& arguments) {
  LaunchOptions& options = arguments.options;
  MANIPLE_REQUIRE(
      !options.share_gpu || arguments.devices_per_process == 0,
      "--share-gpu lets several processes have one GPU, --devices-per-process {} gives each GPUs of its own: "
      "give one of the two",
      arguments.devices_per_process);
  options.devices_per_node = arguments.devices_per_node;
  read_devices(arguments, options);
  read_nodes(arguments, options);
  for (const std::string& text : arguments.environment) options.environment.push_back(parse_assignment(text));
  check_only_ranks(options);
  const double heartbeat = options.heartbeat.interval.count(), silence_limit = options.heartbeat.silence_limit.count();
  MANIPLE_REQUIRE(silence_limit >= kLeastMissedBeats * heartbeat,
                  "--silence-limit is {} s, but there is a --heartbeat every {} s only; expected at least {} s",
                  silence_limit, heartbeat, kLeastMissedBeats * heartbeat);
  if (arguments.explain) {
    fmt::print("{}", explain_plan(planned_nodes(options)));
    return 0;
  }
  if (options.nodes.max == 1 && options.hosts.empty()) {
    const std::string warning = outer_launcher_warning(
        [](const char* name) {
          const char* value = std::getenv(name);
          return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
        },
        options.processes);
    if (!warning.empty()) fmt::print(stderr, "{}\n", warning);
  }
  try {
    return launch::launch(options);
  } catch (const ProgramError& error) {
    fmt::print(stderr, "maniple: {}\n", error.what());
    return error.exit_code;
  }
}

CLI::Option* add_seconds(CLI::App& app, const std::string& names, std::chrono::duration<double>& value,
                         const std::string& help, double least = 0) {
  CLI::Option* option = app.add_option_function<double>(
      names, [&value](const double& seconds) { value = std::chrono::duration<double>(seconds); }, help);
  return takes_seconds(option->type_name("SECONDS")->default_str(fmt::format("{:g}", value.count())), least);
}

/// An option with one value for each name in the list.
template <class Value>
CLI::Option* add_choice(CLI::App& app, const std::string& name, Value& value,
                        std::initializer_list<std::pair<const char*, Value>> choices, const std::string& help) {
  const std::vector<std::pair<std::string, Value>> known(choices.begin(), choices.end());
  CLI::Option* option = app.add_option_function<std::string>(
      name,
      [&value, known](const std::string& given) {
        for (const auto& [word, meaning] : known) {
          if (given == word) value = meaning;
        }
      },
      help);
  std::vector<const char*> words;
  for (const auto& [word, meaning] : choices) words.push_back(word);
  return takes_one_of(option, words);
}

/// Options of mpirun and torchrun that have no alias here.
constexpr const char* kCountAnswer = "use -n N for the number of processes";
struct ForeignOption {
  const char* name;
  const char* answer;
};
constexpr ForeignOption kForeign[] = {
    {"--nproc", kCountAnswer},
    {"--nprocs", kCountAnswer},
    {"--np", kCountAnswer},
    {"--n", kCountAnswer},
    {"-c", kCountAnswer},
    {"-p", kCountAnswer},
    {"--procs", kCountAnswer},
    {"--num-procs", kCountAnswer},
    {"--num-processes", kCountAnswer},
    {"--ntasks", kCountAnswer},
    {"-N", "use --nnodes for nodes, -n for the processes of each"},
    {"--nodes", "use --nnodes N"},
    {"--num-nodes", "use --nnodes N"},
    {"--num-machines", "use --nnodes N"},
    {"--machine-rank", "use --node-rank R"},
    {"-H", "use --hosts a:4,b:4"},
    {"--host", "use --hosts a:4,b:4"},
    {"--machinefile", "use --hostfile FILE"},
    {"-x", "use --env NAME or --env NAME=VALUE"},
    {"--wdir", "use --cwd FOLDER"},
    {"--bind-to", "use --bind cores or --bind none"},
    {"--map-by", "ranks are placed node by node; see --explain"},
    {"--oversubscribe", "leave it out: any number of ranks may share the cores"},
    {"--allow-run-as-root", "leave it out: root may run jobs"},
    {"--tag-output", "leave it out: lines are tagged unless --no-prefix is given"},
    {"-m", "name the interpreter: maniple run -n 2 python3 -m MODULE"},
    {"--module", "name the interpreter: maniple run -n 2 python3 -m MODULE"},
    {"--no-python", "leave it out: programs run as they are"},
    {"-r", "use --log-dir FOLDER"},
    {"--redirects", "use --log-dir FOLDER"},
    {"-t", "use --log-dir FOLDER"},
    {"--tee", "use --log-dir FOLDER"},
    {"--local-ranks-filter", "use --only-rank R"},
    {"--monitor-interval", "leave it out: the end of a rank is noticed at once"},
    {"--rdzv-conf", "use --join-timeout SECONDS"},
};

std::string unknown_option(const CLI::App& app, const std::string& given) {
  std::string name = given.substr(0, given.find('='));
  std::replace(name.begin(), name.end(), '_', '-');
  for (const ForeignOption& foreign : kForeign) {
    if (name == foreign.name) return fmt::format("no option {}: {}", given, foreign.answer);
  }
  std::string nearest;
  std::size_t least = kFarthest + 1;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& known : option->get_lnames()) {
      const std::size_t distance = edit_distance(name, "--" + known);
      if (distance >= least) continue;
      least = distance;
      nearest = known;
    }
  }
  return nearest.empty()
             ? fmt::format("no option {} (see maniple run --help); a program of that name: -- {}", given, given)
             : fmt::format("no option {}; did you mean --{}? (see maniple run --help)", given, nearest);
}

/// Adds PROGRAM, unknown to CLI11, to the usage line.
struct RunHelp : CLI::Formatter {
  RunHelp() { column_width(44); }
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: maniple run [options] PROGRAM [its arguments]\n";
  }
};

}  // namespace

std::function<int()> declare_run(CLI::App& app) {
  auto arguments = std::make_shared<RunArguments>();
  LaunchOptions& options = arguments->options;
  app.prefix_command();
  app.formatter(std::make_shared<RunHelp>());
  app.footer(
      "Examples:\n"
      "  maniple run -n 4 ./train --epochs 3\n"
      "  maniple run --nnodes 2 --node-rank 0 --master 10.0.0.1:29500 --secret-file s -n 4 ./train   (on each node)\n"
      "  maniple run --hosts a:4,b:4 ./train\n"
      "  maniple run --explain -n 4 ./train\n"
      "Exit codes, signals and what workers find in their environment: docs/launch.md");

  const char* ranks = "Ranks";
  app.add_option("-n,--nproc-per-node,--nproc_per_node", arguments->processes,
                 "processes on each node: a number, auto, gpu, cpu")
      ->type_name("N")
      ->group(ranks);
  takes_whole_number(
      app.add_option("--devices-per-node", arguments->devices_per_node, "GPUs of each node; default: those seen here")
          ->type_name("G")
          ->group(ranks),
      1);
  takes_whole_number(app.add_option("--devices-per-process", arguments->devices_per_process, "GPUs for each process")
                         ->type_name("D")
                         ->group(ranks),
                     1);
  app.add_flag("--share-gpu", options.share_gpu,
               "several processes on each GPU, at the same time: starts NVIDIA's MPS for the job")
      ->group(ranks);
  add_choice(app, "--bind", options.bind, {{"cores", BindPolicy::cores}, {"none", BindPolicy::none}},
             "cores: each rank has cores of its own; none: any core. Default: cores, unless another job of this user "
             "runs here")
      ->group(ranks);
  takes_whole_number(app.add_option("--cores-per-process", options.cores_per_process,
                                    "cores for each process; default: an equal part of the machine's cores")
                         ->type_name("C")
                         ->group(ranks),
                     1);
  app.add_flag("--explain", arguments->explain, "print the table of ranks, start nothing")->group(ranks);

  const char* nodes = "Several nodes";
  app.add_option("--nnodes", arguments->nodes, "number of nodes, or a range: 2:4")
      ->type_name("N|MIN:MAX")
      ->capture_default_str()
      ->group(nodes);
  takes_whole_number(
      app.add_option("--node-rank,--node_rank", arguments->node_rank, "rank of this node; default: by arrival")
          ->type_name("R")
          ->group(nodes),
      -1);
  app.add_option("--master,--rdzv-endpoint,--rdzv_endpoint", arguments->master,
                 "HOST:PORT of node 0, the same on every node")
      ->type_name("HOST:PORT")
      ->group(nodes);
  app.add_option("--master-addr,--master_addr", arguments->master_addr, "HOST of node 0")
      ->type_name("HOST")
      ->group(nodes);
  takes_whole_number(app.add_option("--master-port,--master_port", arguments->master_port, "PORT of node 0")
                         ->type_name("PORT")
                         ->group(nodes),
                     0, 65535);
  app.add_flag("--standalone", arguments->standalone, "one node (the default)")->group(nodes);
  // torchrun options without meaning here are accepted and ignored.
  app.add_option("--rdzv-backend,--rdzv_backend", arguments->ignored)->group("");
  app.add_option("--rdzv-id,--rdzv_id", arguments->ignored)->group("");
  app.add_option("--secret-file", options.secret_file, "file (mode 0600) with the secret that all nodes share")
      ->type_name("FILE")
      ->group(nodes);
  add_seconds(app, "--join-timeout", options.join_timeout, "seconds to wait for all nodes")->group(nodes);
  add_seconds(app, "--join-window", options.join_window, "seconds to wait for more than the least number")
      ->group(nodes);
  add_seconds(app, "--heartbeat", options.heartbeat.interval,
              "seconds between signs of life of the launchers (the master's counts)", 0.01)
      ->group(nodes);
  add_seconds(app, "--silence-limit", options.heartbeat.silence_limit, "seconds without any after which a node is lost")
      ->group(nodes);
  app.add_option("--hosts", arguments->hosts, "start the ranks on these hosts, over ssh")
      ->type_name("a:4,b:4")
      ->group(nodes);
  app.add_option("--hostfile", arguments->hostfile, "the same from a file, a host on each line")
      ->type_name("FILE")
      ->group(nodes);
  app.add_option("--rsh", options.rsh, "the remote shell")->type_name("COMMAND")->capture_default_str()->group(nodes);
  app.add_option("--remote-maniple", options.remote_maniple, "path of maniple on the other hosts")
      ->type_name("PATH")
      ->group(nodes);

  const char* worker = "Workers";
  app.add_option("--env", arguments->environment, "NAME=VALUE for the workers, or NAME to pass it on to other hosts")
      ->type_name("NAME=VALUE")
      ->allow_extra_args(false)
      ->group(worker);
  app.add_option("--cwd", options.folder, "folder in which the workers start")->type_name("FOLDER")->group(worker);

  const char* logs = "Logs";
  app.add_option("--log-dir,--log_dir", options.log_folder, "a file for each rank in this folder")
      ->type_name("FOLDER")
      ->group(logs);
  takes_whole_number(app.add_option("--only-rank", options.only_ranks, "show the lines of this rank only; repeatable")
                         ->type_name("R")
                         ->allow_extra_args(false)
                         ->group(logs),
                     0);
  app.add_flag("-q,--quiet", options.console.quiet, "show no lines of workers, no status")->group(logs);
  app.add_flag("-v,--verbose", options.verbose, "say which pid and cores each rank has")->group(logs);
  app.add_flag_callback(
         "--no-prefix", [&options] { options.console.prefix = false; }, "no [rank N] before the lines")
      ->group(logs);
  add_choice(
      app, "--stdout", options.terminal_output, {{"terminal", true}, {"pipe", false}},
      "what workers see as standard output. terminal: lines are written as they are printed; pipe: the C library "
      "collects some KiB")
      ->group(logs);
  add_choice(app, "--color", options.console.colour,
             {{"auto", ColourChoice::automatic}, {"always", ColourChoice::always}, {"never", ColourChoice::never}},
             "auto, always, never")
      ->group(logs);

  const char* failure = "Failure";
  takes_whole_number(app.add_option("--max-restarts,--max_restarts", options.restarts.max_restarts,
                                    "number of times to start the group again")
                         ->type_name("K")
                         ->capture_default_str()
                         ->group(failure),
                     0);
  app.add_option("--elastic", arguments->elastic,
                 "the job goes on with MIN to MAX processes while lost ones are replaced (docs/elastic.md)")
      ->type_name("MIN:MAX")
      ->group(failure);
  add_seconds(app, "--restart-delay", options.restarts.first_delay,
              "seconds before the first restart, doubled up to 30 s")
      ->group(failure);
  add_seconds(app, "--grace", options.grace, "seconds between SIGTERM and SIGKILL when a rank has failed")
      ->group(failure);
  add_seconds(app, "--grace-interrupt", options.interrupt_grace, "seconds that workers have after Ctrl-C")
      ->group(failure);

  return [arguments, &app] {
    arguments->options.command = app.remaining();
    std::vector<std::string>& command = arguments->options.command;
    if (!command.empty() && command.front() == kEndOfOptions) {
      command.erase(command.begin());
    } else if (!command.empty() && command.front().starts_with('-')) {
      throw InvalidArgument(unknown_option(app, command.front()));
    }
    return run(*arguments);
  };
}

std::function<int()> declare_run_agent(CLI::App& app) {
  auto coordinator = std::make_shared<std::string>();
  auto node_rank = std::make_shared<int>(0);
  app.add_option("coordinator", *coordinator)->required();
  app.add_option("node_rank", *node_rank)->required();
  auto share_gpu = std::make_shared<bool>(false);
  app.add_flag("--share-gpu", *share_gpu);
  return [=] { return launch::serve_as_agent(*coordinator, *node_rank, *share_gpu); };
}

}  // namespace maniple::cli
