// `maniple doctor`: checks for common problems and suggests fixes.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <memory>

#include "launch/option_values.h"
#include "tools/cli/command.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/hosts.h"
#include <maniple/version.h>

namespace maniple::cli {
namespace {

using doctor::Findings;
using doctor::Verdict;

struct DoctorOptions {
  std::string hosts;
  doctor::HostOptions reach;
  bool json = false;
  std::string answer, connect_back, token;  // for the remote side of --hosts
};

const char* colour_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::ok: return "\033[32m";
    case Verdict::warn: return "\033[33m";
    case Verdict::fail: return "\033[1;31m";
  }
  return "";
}

void print_findings(const std::string& check, const Findings& findings, bool colour) {
  for (const doctor::Finding& finding : findings) {
    fmt::print("{}{:<4}{}  {:<10}  {}\n", colour ? colour_of(finding.verdict) : "", to_string(finding.verdict),
               colour ? "\033[0m" : "", check, finding.found);
    if (!finding.fix.empty()) fmt::print("{:18}-> {}\n", "", finding.fix);
  }
}

nlohmann::json json_of(const std::string& check, const doctor::Finding& finding) {
  nlohmann::json entry = {{"check", check}, {"verdict", to_string(finding.verdict)}, {"found", finding.found}};
  if (!finding.fix.empty()) entry["fix"] = finding.fix;
  return entry;
}

int examine(const DoctorOptions& options) {
  std::vector<launch::HostSlots> hosts;
  if (!options.hosts.empty()) hosts = launch::parse_hosts(options.hosts);  // before anything is printed
  const bool colour = ::isatty(STDOUT_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr;
  auto list = nlohmann::json::array();
  int counts[3] = {};
  const auto take = [&](const std::string& check, const Findings& findings) {
    for (const doctor::Finding& finding : findings) {
      ++counts[static_cast<int>(finding.verdict)];
      list.push_back(json_of(check, finding));
    }
    if (!options.json) print_findings(check, findings, colour);
  };
  for (const doctor::Check& check : doctor::checks()) take(check.name, check.run());
  for (const launch::HostSlots& each : hosts) {
    std::fflush(stdout);
    take("hosts", doctor::judge(doctor::inspect_host(each.host, options.reach), version()));
  }
  if (options.json) {
    fmt::print("{}\n", list.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
  } else {
    fmt::print("{} ok, {} to look at, {} to fix\n", counts[0], counts[1], counts[2]);
  }
  return counts[2] == 0 ? 0 : kFailed;
}

}  // namespace

std::function<int()> declare_doctor(CLI::App& app) {
  auto options = std::make_shared<DoctorOptions>();
  app.add_option("--hosts", options->hosts, "machines to reach, such as a,b,c; each also connects back to this one");
  app.add_option("--rsh", options->reach.remote_shell, "remote shell and its options")->capture_default_str();
  app.add_option("--remote-program", options->reach.program,
                 "path of maniple on the other machines [the path on this one]");
  app.add_flag("--json", options->json, "print JSON");
  app.add_option("--answer", options->answer)->group("");
  app.add_option("--connect-back", options->connect_back)->group("");
  app.add_option("--token", options->token)->group("");
  return [options] {
    if (!options->answer.empty())
      return doctor::answer_doctor(options->answer, options->connect_back, options->token, version());
    return examine(*options);
  };
}

}  // namespace maniple::cli
