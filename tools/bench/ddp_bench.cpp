#include "tools/bench/ddp_bench.h"

#include <unistd.h>

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "comm/base/check.h"
#include "tools/bench/process_set.h"
#include <maniple/comm/options.h>

namespace maniple::bench {
namespace {

constexpr const char* kModels[] = {"mnist_cnn", "mlp25m", "gpt5m", "tiny50"};

nlohmann::ordered_json to_json(const DdpRow& row) {
  return {{"system", row.system},           {"model", row.model},    {"ranks", row.ranks},
          {"nosync_ms", row.nosync_ms},     {"ddp_ms", row.ddp_ms},  {"efficiency", row.efficiency},
          {"peak_rss_mb", row.peak_rss_mb}, {"overlap", row.overlap}};
}

/// The row with the median efficiency.
DdpRow middle(std::vector<DdpRow> rows) {
  std::sort(rows.begin(), rows.end(), [](const DdpRow& a, const DdpRow& b) { return a.efficiency < b.efficiency; });
  return rows[(rows.size() - 1) / 2];
}

}  // namespace

std::vector<std::string> checked_models(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const bool known = std::find(std::begin(kModels), std::end(kModels), name) != std::end(kModels);
    MANIPLE_REQUIRE(known, "no model \"{}\"; expected some of {}", name, joined(kModels));
  }
  return names.empty() ? std::vector<std::string>(std::begin(kModels), std::end(kModels)) : names;
}

DdpRow parse_ddp_row(const std::string& text) {
  try {
    const auto json = nlohmann::json::parse(text);
    return {json.at("system"), json.at("model"),      json.at("ranks"),       json.at("nosync_ms"),
            json.at("ddp_ms"), json.at("efficiency"), json.at("peak_rss_mb"), json.at("overlap")};
  } catch (const nlohmann::json::exception& error) {
    throw InvalidArgument(fmt::format("not a row of `maniple bench ddp`: {} ({})", text, error.what()));
  }
}

std::string ddp_report_text(const Machine& machine, const std::vector<DdpRow>& rows) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const DdpRow& row : rows) list.push_back(to_json(row));
  return report_text(machine, list);
}

std::string ddp_table_header() {
  return fmt::format("{:<8}  {:<10} {:>5}  {:>10}  {:>10}  {:>10}  {:>11}  {:>7}\n", "system", "model", "ranks",
                     "nosync_ms", "ddp_ms", "efficiency", "peak_rss_mb", "overlap");
}

std::string ddp_table_line(const DdpRow& row) {
  return fmt::format("{:<8}  {:<10} {:>5}  {:>10.3f}  {:>10.3f}  {:>10.3f}  {:>11.1f}  {:>7}\n", row.system, row.model,
                     row.ranks, row.nosync_ms, row.ddp_ms, row.efficiency, row.peak_rss_mb, row.overlap);
}

void DdpBench::add_warning(const std::string& text) {
  if (std::find(warnings_.begin(), warnings_.end(), text) == warnings_.end()) warnings_.push_back(text);
}

// Debian's torch module works only with Debian's Python, which may not be the first in PATH.
std::string DdpBench::python_with_torch() {
  for (const char* python : {"python3", "/usr/bin/python3", "python"}) {
    try {
      ChildSpec spec;
      spec.name = python;
      spec.argv = {python, "-c", "import torch.distributed; assert torch.distributed.is_available()"};
      run_tool(spec, watch_);
      return python;
    } catch (const Error&) {
      continue;  // not installed, or without the module
    }
  }
  return "";
}

DdpRow DdpBench::measure(const std::vector<std::string>& program, const std::string& system, const std::string& model,
                         int ranks, const DdpRequest& request) {
  progress_(fmt::format("{} {} with {} ranks", system, model, ranks));
  const std::string result = "file://" + testbed_.scratch->new_path("ddp");
  std::vector<ChildSpec> specs;
  for (int rank = 0; rank < ranks; ++rank) {
    ChildSpec spec;
    spec.name = fmt::format("{} rank {}", system, rank);
    spec.argv = program;
    for (const std::string& argument : {model, std::to_string(rank), std::to_string(ranks), result,
                                        std::to_string(request.iterations), std::to_string(request.seconds)}) {
      spec.argv.push_back(argument);
    }
    spec.environment = {{"OMP_NUM_THREADS", "1"},
                        {"OPENBLAS_NUM_THREADS", "1"},
                        {"MKL_NUM_THREADS", "1"},
                        {"GLOO_SOCKET_IFNAME", "lo"}};
    specs.push_back(std::move(spec));
  }
  std::string printed;
  run_process_set(
      specs,
      [&](std::string_view line) {
        if (line.starts_with('{')) printed = line;
      },
      Deadline::after(Seconds(request.timeout_s)), watch_);
  return parse_ddp_row(printed);
}

std::vector<DdpRow> DdpBench::run(const DdpRequest& request, const std::function<void(const DdpRow&)>& on_row) {
  const std::vector<std::string> models = checked_models(request.models);
  const std::string worker = testbed_.libexec + "/ddp_worker";
  if (access(worker.c_str(), X_OK) != 0) {
    throw Unsupported(fmt::format(
        "this build has no {}: it was made without LibTorch (Debian: apt-get install libtorch-dev, then build again)",
        worker));
  }
  std::vector<std::pair<std::string, std::vector<std::string>>> systems = {{"maniple", {worker}}};
  if (request.torch) {
    const std::string python = python_with_torch();
    if (python.empty())
      add_warning("torch was not measured: no python3 here has it (Debian: apt-get install python3-torch)");
    if (!python.empty()) systems.push_back({"torch", {python, testbed_.libexec + "/ddp_torch.py"}});
  }
  std::vector<DdpRow> rows;
  for (const int ranks : request.ranks) {
    for (const std::string& model : models) {
      for (const auto& [system, program] : systems) {
        try {
          std::vector<DdpRow> repetitions;
          for (int i = 0; i < std::max(1, request.repeat); ++i)
            repetitions.push_back(measure(program, system, model, ranks, request));
          rows.push_back(middle(std::move(repetitions)));
          on_row(rows.back());
        } catch (const Error& error) {
          add_warning(fmt::format("{} {}: {}", system, model, error.what()));
          failed_ = failed_ || system == "maniple";
        }
      }
    }
  }
  return rows;
}

}  // namespace maniple::bench
