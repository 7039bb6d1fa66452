// `maniple ps`: this user's jobs on this machine.
#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <ctime>
#include <memory>

#include "base/environment.h"
#include "cli/command.h"
#include "jobs/job_list.h"

namespace maniple::cli {
namespace {

// Of the terminal; unlimited when the table goes into a file or a pipe.
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
  app.add_flag("--json", *json, "a list for programs instead of a table");
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

}  // namespace maniple::cli
