// The table of subcommands, and the subcommands that only print: backends, knobs, ps, version.
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <memory>
#include <string_view>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "comm/backend/backend.h"
#include "comm/base/environment.h"
#include "comm/base/own_variables.h"
#include "launch/jobs/job_control.h"
#include "launch/jobs/job_list.h"
#include "tools/cli/command.h"
#include "tools/cli/option_checks.h"
#include <maniple/version.h>

namespace maniple::cli {
namespace {

int print_backends() {
  std::size_t width = 0;
  for (const BackendEntry& entry : backends()) width = std::max(width, std::string_view(entry.sentence).size());
  fmt::print("{:<8} {:<8} {:<{}} how to get it\n", "backend", "state", "what it is", width);
  for (const BackendEntry& entry : backends()) {
    const std::string missing = entry.missing();
    fmt::print("{:<8} {:<8} {:<{}} {}\n", entry.name, missing.empty() ? "here" : "missing", entry.sentence, width,
               missing.empty() ? "-" : missing);
  }
  return 0;
}

/// 0: not a terminal.
std::size_t terminal_width() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

int print_knobs() {
  fmt::print("{}", knobs_table(environment_text, terminal_width()));
  const auto unknown = unknown_variables();
  if (!unknown.empty()) fmt::print("\n{}\n", describe_unknown(unknown));
  return 0;
}

int print_version() {
  fmt::print("maniple {}\n", version());
  return 0;
}

template <int (*print)()>
std::function<int()> without_options(CLI::App&) {
  return print;
}

}  // namespace

std::span<const Command> commands() noexcept {
  static constexpr Command kCommands[] = {
      {"run", "start a program as the ranks of a job, on this machine or on many", declare_run},
      {"ps", "list this user's running jobs", declare_ps},
      {"resize", "change the number of workers of a running elastic job", declare_resize},
      {"doctor", "check a machine for common problems and show how to fix them", declare_doctor},
      {"backends", "list the backends: what each does, whether it is installed, how to get it",
       without_options<print_backends>},
      {"bench", "measure the operations and compare them with this machine's limits and other libraries",
       declare_bench},
      {"checkpoint", "list, verify, merge and split checkpoints", declare_checkpoint},
      {"knobs", "list the MANIPLE_ variables that change behaviour", without_options<print_knobs>},
      {"version", "print the version", without_options<print_version>},
      {"bench-worker", "", declare_bench_worker},
      {"run-agent", "", declare_run_agent},
  };
  return kCommands;
}

// `maniple ps`: this user's jobs on this machine.

namespace {

// The terminal's width; 0 (unlimited) when the table goes into a file or a pipe.
int width_of_output() {
  if (const auto columns = environment_integer("COLUMNS", 0, 100'000)) return static_cast<int>(*columns);
  winsize size{};
  if (::isatty(STDOUT_FILENO) == 0) return 0;
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

nlohmann::json json_of(const launch::JobInfo& job, std::int64_t now) {
  return {{"id", job.id},
          {"pid", job.pid},
          {"command", job.command},
          {"world_size", job.world_size},
          {"hosts", job.hosts},
          {"ranks_up", job.ranks_up},
          {"restarts", job.restarts},
          {"state", job.state},
          {"started", job.started},
          {"elapsed_s", now - job.started}};
}

}  // namespace

std::function<int()> declare_ps(CLI::App& app) {
  auto json = std::make_shared<bool>(false);
  app.add_flag("--json", *json, "print JSON instead of a table");
  return [json] {
    const auto jobs = launch::running_jobs();
    const std::int64_t now = std::time(nullptr);
    if (*json) {
      auto list = nlohmann::json::array();
      for (const launch::JobInfo& job : jobs) list.push_back(json_of(job, now));
      fmt::print("{}\n", list.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
    } else if (jobs.empty()) {
      fmt::print("no jobs are running\n");
    } else {
      fmt::print("{}", launch::job_table(jobs, now, width_of_output()));
    }
    return 0;
  };
}

// `maniple resize`: another number of workers for a running job.

std::function<int()> declare_resize(CLI::App& app) {
  auto job = std::make_shared<std::string>();
  auto workers = std::make_shared<int>(0);
  app.add_option("JOB", *job, "its name or pid, from `maniple ps`")->type_name("")->required();
  takes_whole_number(
      app.add_option("N", *workers, "workers, in the range of the job's --elastic")->type_name("")->required(), 1);
  return [job, workers] {
    const launch::ControlAnswer answer = launch::ask_job(*job, fmt::format("resize {}", *workers));
    if (!answer.accepted) {
      fmt::print(stderr, "maniple: job {} is not resized: {}\n", *job, answer.text);
      return kFailed;
    }
    fmt::print("maniple: job {}: {}\n", *job, answer.text);
    return 0;
  };
}

}  // namespace maniple::cli
