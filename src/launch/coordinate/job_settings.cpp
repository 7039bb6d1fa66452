#include "launch/coordinate/job_settings.h"

#include <unistd.h>

#include <charconv>
#include <climits>
#include <cmath>
#include <cstdlib>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/check.h"
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

int number_in(const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    throw ProtocolError("a setting that is no number: " + text);
  return value;
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
  WorkerGroupSettings settings{.command = options.command,
                               .folder = options.folder,
                               .environment = own_environment(),
                               .host = own_host_name(),
                               .log_folder = options.log_folder,
                               .only_ranks = options.only_ranks,
                               .quiet = options.console.quiet,
                               .bind = options.bind,
                               .cores_per_process = options.cores_per_process,
                               .verbose = options.verbose,
                               .terminal_output = options.terminal_output,
                               .share_gpu = options.share_gpu,
                               .devices_per_node = options.devices_per_node};
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

std::vector<std::string> encode_settings(const LaunchOptions& options, Console& console) {
  std::vector<std::string> list;
  const auto add = [&](const char* name, const std::string& value) { list.push_back(std::string(name) + "=" + value); };
  for (const std::string& argument : options.command) add("argument", argument);
  add("folder", options.folder.empty() ? present_folder() : options.folder);
  for (const std::string& entry : own_environment()) {
    if (entry.starts_with("MANIPLE_") && !entry.starts_with("MANIPLE_SECRET")) add("variable", entry);
  }
  for (const Assignment& assignment : options.environment) {
    const char* own = std::getenv(assignment.name.c_str());
    if (assignment.inherit && own == nullptr) continue;
    add("variable", assignment.name + "=" + (assignment.inherit ? own : assignment.value));
  }
  if (!options.log_folder.empty()) add("log_folder", options.log_folder);
  for (const int rank : options.only_ranks) add("only_rank", std::to_string(rank));
  if (options.console.quiet) add("quiet", "1");
  if (!options.console.prefix) add("no_prefix", "1");
  if (console.prefix_for(0, false).starts_with("\x1b")) add("colour", "1");
  if (options.bind != BindPolicy::automatic) add("bind", options.bind == BindPolicy::cores ? "cores" : "none");
  if (options.verbose) add("verbose", "1");
  if (!options.terminal_output) add("pipe_output", "1");
  if (options.share_gpu) add("share_gpu", "1");
  add("devices_per_node", std::to_string(options.devices_per_node));
  add("cores_per_process", std::to_string(options.cores_per_process));
  add("join_timeout", std::to_string(static_cast<int>(std::ceil(options.join_timeout.count()))));
  add("max_restarts", std::to_string(options.restarts.max_restarts));
  return list;
}

LaunchOptions decode_settings(const std::vector<std::string>& settings) {
  LaunchOptions options;
  options.console.colour = ColourChoice::never;
  options.console.status = false;
  for (const std::string& setting : settings) {
    const auto equals = setting.find('=');
    if (equals == std::string::npos) throw ProtocolError("a setting without a value");
    const std::string name = setting.substr(0, equals);
    const std::string value = setting.substr(equals + 1);
    if (name == "argument")
      options.command.push_back(value);
    else if (name == "folder")
      options.folder = value;
    else if (name == "variable")
      options.environment.push_back(parse_assignment(value));
    else if (name == "log_folder")
      options.log_folder = value;
    else if (name == "only_rank")
      options.only_ranks.push_back(number_in(value));
    else if (name == "quiet")
      options.console.quiet = true;
    else if (name == "no_prefix")
      options.console.prefix = false;
    else if (name == "colour")
      options.console.colour = ColourChoice::always;
    else if (name == "bind")
      options.bind = value == "cores" ? BindPolicy::cores : BindPolicy::none;
    else if (name == "verbose")
      options.verbose = true;
    else if (name == "pipe_output")
      options.terminal_output = false;
    else if (name == "share_gpu")
      options.share_gpu = true;
    else if (name == "devices_per_node")
      options.devices_per_node = number_in(value);
    else if (name == "cores_per_process")
      options.cores_per_process = number_in(value);
    else if (name == "join_timeout")
      options.join_timeout = std::chrono::seconds(number_in(value));
    else if (name == "max_restarts")
      options.restarts.max_restarts = number_in(value);
    else
      throw ProtocolError("an unknown setting: " + name);
  }
  if (options.command.empty()) throw ProtocolError("a job without a program");
  return options;
}

}  // namespace maniple::launch
