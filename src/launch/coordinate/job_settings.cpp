#include "launch/coordinate/job_settings.h"

#include <unistd.h>

#include <climits>
#include <cstdlib>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/net/handshake_wire.h"

namespace maniple::launch {
namespace {

std::string present_folder() {
  char path[PATH_MAX];
  return ::getcwd(path, sizeof path) != nullptr ? path : std::string();
}

bool shows_colours(const ConsoleOptions& console) {
  return console.colour == ColourChoice::automatic ? ::isatty(STDOUT_FILENO) == 1
                                                   : console.colour == ColourChoice::always;
}

}  // namespace

std::string own_host_name() {
  char name[HOST_NAME_MAX + 1] = "unknown";
  ::gethostname(name, HOST_NAME_MAX);
  return name;
}

std::string new_job_name() {
  std::array<std::uint8_t, 4> bytes;
  fill_random(bytes);
  return fmt::format("run-{:02x}", fmt::join(bytes, ""));
}

WorkerGroupSettings worker_group_settings(const LaunchOptions& options) {
  WorkerGroupSettings settings{options, own_environment(), own_host_name(), options.console.quiet, options.elastic.max};
  if (options.terminal_output && !shows_colours(options.console)) {
    // The workers' pseudo-terminal ends in a file or a pipe.
    set_variable(settings.environment, "TERM", "dumb");
    set_variable(settings.environment, "NO_COLOR", "1");
  }
  for (const Assignment& assignment : options.environment) {
    if (!assignment.inherit) set_variable(settings.environment, assignment.name, assignment.value);
  }
  return settings;
}

std::string given_mps_folder(const LaunchOptions& options) {
  constexpr const char* kName = "CUDA_MPS_PIPE_DIRECTORY";
  const char* own = std::getenv(kName);
  const std::string here = own != nullptr ? own : "";
  for (const Assignment& assignment : options.environment) {
    if (assignment.name == kName) return assignment.inherit ? here : assignment.value;
  }
  return options.hosts.empty() ? here : "";
}

LaunchOptions options_for_agents(const LaunchOptions& options, const Console& console) {
  LaunchOptions sent = options;
  if (sent.folder.empty()) sent.folder = present_folder();
  sent.environment.clear();
  for (const std::string& entry : own_environment()) {
    if (entry.starts_with("MANIPLE_") && !entry.starts_with("MANIPLE_SECRET"))
      sent.environment.push_back(parse_assignment(entry));
  }
  for (const Assignment& assignment : options.environment) {
    const char* own = std::getenv(assignment.name.c_str());
    if (assignment.inherit && own == nullptr) continue;
    sent.environment.push_back({.name = assignment.name, .value = assignment.inherit ? own : assignment.value});
  }
  sent.console.status = false;
  sent.console.colour = console.prefix_for(0, false).starts_with("\x1b") ? ColourChoice::always : ColourChoice::never;
  return sent;
}

}  // namespace maniple::launch
