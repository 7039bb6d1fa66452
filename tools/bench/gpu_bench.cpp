// The measurements of `maniple bench gpu`, and how their programs are started. Rows, table and goals are in
// gpu_report.cpp.
#include "tools/bench/gpu_bench.h"

#include <fnmatch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "comm/backend/plugin/load.h"
#include "comm/base/check.h"
#include "launch/process/rank_environment.h"

namespace maniple::bench {
namespace {

using Program = GpuMeasurement::Program;

constexpr const char* kSizes = "4,1M,64M,256M";
constexpr const char* kRounds = "5";          // of collectives
constexpr const char* kMilliseconds = "30";   // per round and variant
constexpr const char* kTrainingRounds = "7";  // of several steps each
constexpr std::chrono::seconds kLimit{60};    // for one measurement
constexpr const char* kMpsControl = "nvidia-cuda-mps-control";
constexpr const char* kMpsFolder = "CUDA_MPS_PIPE_DIRECTORY";
constexpr const char* kGpuModels[] = {"resnet50", "gpt2", "mlp"};

std::string program_name(const GpuMeasurement& one) {
  switch (one.program) {
    case Program::collectives: return "gpu_worker";
    case Program::limit: return "limit_gpu";
    case Program::ddp: return "ddp_gpu_worker";
    default: return "ddp_gpu_torch.py";
  }
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

/// The program's own first error line, without the surrounding report of `maniple run`.
std::string cause_in(const std::string& text, const std::string& program) {
  const std::size_t found = text.find(program + ": ");
  return first_line(found == std::string::npos ? text : text.substr(found));
}

/// The first line that the script prints; empty if the script fails.
std::string python_says(const std::string& python, const char* script, const SignalWatch& watch) {
  std::string said;
  try {
    ChildSpec spec;
    spec.name = python;
    spec.argv = {python, "-c", script};
    const auto keep = [&](std::string_view line) {
      if (said.empty()) said = line;
    };
    run_process_set({spec}, keep, Deadline::after(std::chrono::seconds(60)), watch);
    return said;
  } catch (const Error&) {
    return {};  // not installed, or without the module
  }
}

}  // namespace

std::string GpuMeasurement::name() const {
  const bool training = program == Program::ddp || program == Program::torch;
  std::string who = subject;
  if (program == Program::limit) who = "limit";
  if (program == Program::ddp) who = backend == "cuda" ? "maniple" : "maniple over " + backend;
  if (program == Program::torch) who = "torch";
  return fmt::format("{} {}, {} rank{}{}", training ? subject : "all_reduce", who, ranks, ranks == 1 ? "" : "s",
                     mps ? ", MPS" : "");
}

std::vector<GpuMeasurement> gpu_measurements() {
  std::vector<GpuMeasurement> all;
  for (const char* model : kGpuModels) {
    all.push_back({Program::ddp, model, 1, false, true});
    all.push_back({Program::torch, model, 1, false, true});
    for (const char* backend : {"nccl", "native"}) all.push_back({Program::ddp, model, 1, false, false, backend});
  }
  for (const int ranks : {2, 4, 8}) all.push_back({Program::ddp, "resnet50", ranks, true, ranks < 8});
  for (const int ranks : {1, 2, 4, 8}) {
    for (const bool mps : {false, true}) {
      const bool usual = mps == (ranks > 1) || ranks == 2;
      all.push_back({Program::collectives, "cuda", ranks, mps, usual || ranks == 4});
      all.push_back({Program::collectives, "nccl", ranks, mps, usual && ranks < 4});
      all.push_back({Program::collectives, "native", ranks, mps, mps == (ranks > 1) && ranks < 4});
      if (mps && ranks > 1) all.push_back({Program::limit, "", ranks, mps, true});
    }
  }
  return all;
}

std::vector<GpuMeasurement> picked_measurements(const std::string& only) {
  std::vector<GpuMeasurement> picked;
  const std::string pattern = "*" + only + "*";
  for (const GpuMeasurement& one : gpu_measurements()) {
    if (only.empty() ? one.by_default : fnmatch(pattern.c_str(), one.name().c_str(), 0) == 0) picked.push_back(one);
  }
  MANIPLE_REQUIRE(!picked.empty(),
                  "--only is \"{}\", which no measurement's name contains; `maniple bench gpu --list` shows them",
                  only);
  return picked;
}

std::string GpuBench::missing(const GpuMeasurement& one) {
  const std::string program = testbed_.libexec + "/" + program_name(one);
  if (one.mps && std::getenv(kMpsFolder) == nullptr && !on_path(kMpsControl)) {
    return fmt::format("{} is not on PATH; it is a part of NVIDIA's driver (docs/gpu.md)", kMpsControl);
  }
  if (one.program == Program::torch) {
    return python_.empty() ? "no python3 here has PyTorch with CUDA and NCCL" : "";
  }
  if (access(program.c_str(), X_OK) != 0) {
    return fmt::format("this build has no {}; it needs {}, and is built by the target bench_gpu", program_name(one),
                       one.program == Program::ddp ? "LibTorch with CUDA" : "the CUDA toolkit (nvcc)");
  }
  if (one.program == Program::limit) return {};
  const std::string& backend = one.program == Program::ddp ? one.backend : one.subject;
  const std::string runtime = missing_plugin("cuda");  // every backend needs its device runtime
  if (!runtime.empty() || backend != "nccl" || !nccl_folder_.empty()) return runtime;
  return missing_plugin("nccl");
}

ChildSpec GpuBench::process(const GpuMeasurement& one) const {
  ChildSpec spec;
  spec.name = one.name();
  spec.environment = {{"CUDA_VISIBLE_DEVICES", device_}};
  // Avoids MPS even if a daemon runs in the default folder: CUDA finds none in this one.
  if (!one.mps) spec.environment.emplace_back(kMpsFolder, testbed_.scratch->file("no-mps"));
  if (!nccl_folder_.empty() && one.program != Program::torch) {
    const char* const before = std::getenv("LD_LIBRARY_PATH");
    spec.environment.emplace_back("LD_LIBRARY_PATH",
                                  (before != nullptr ? std::string(before) + ":" : "") + nccl_folder_);
  }
  const std::string program = testbed_.libexec + "/" + program_name(one);
  if (one.program == Program::torch) {
    spec.argv = {python_, program, one.subject, kTrainingRounds};
    return spec;
  }
  spec.death_signal = SIGTERM;  // so that it ends its workers
  const bool forks = one.program == Program::limit;
  spec.argv = {testbed_.program,
               "run",
               "-n",
               std::to_string(forks ? 1 : one.ranks),
               "--no-prefix",
               "--stdout",
               "pipe",
               "--grace",
               "2",
               "--grace-interrupt",
               "2"};
  if (one.mps) spec.argv.emplace_back("--share-gpu");
  const auto add = [&](std::initializer_list<std::string> words) { spec.argv.insert(spec.argv.end(), words); };
  add({program});
  switch (one.program) {
    case Program::collectives: add({one.subject, kSizes, kRounds, kMilliseconds}); break;
    case Program::limit: add({std::to_string(one.ranks), kSizes, kRounds, kMilliseconds}); break;
    default: add({one.subject, one.backend, kTrainingRounds, one.ranks == 1 ? "plain,DDP" : "DDP"}); break;
  }
  return spec;
}

std::vector<GpuRow> GpuBench::measure(const GpuMeasurement& one) {
  const bool training = one.program == Program::ddp || one.program == Program::torch;
  GpuRow empty;
  empty.what = training ? one.subject : "all_reduce";
  empty.system = one.program == Program::limit   ? "limit"
                 : one.program == Program::ddp   ? "maniple"
                 : one.program == Program::torch ? "torch"
                                                 : one.subject;
  empty.ranks = one.ranks;
  empty.mps = one.mps;
  empty.missing = missing(one);
  if (!empty.missing.empty()) return {empty};
  std::vector<GpuRow> rows;
  try {
    const auto take = [&](std::string_view line) {
      if (!line.starts_with('{')) return;
      if (line.starts_with("{\"gpu\"")) {
        gpu_ = nlohmann::json::parse(line).value("gpu", gpu_);
        return;
      }
      rows.push_back(parse_gpu_row(line));
      rows.back().mps = one.mps;
      if (one.program == Program::ddp && one.backend != "cuda") rows.back().system += "-" + one.backend;
    };
    run_process_set({process(one)}, take, Deadline::after(kLimit), watch_);
    if (rows.empty()) throw ProcessSetFailed(one.name() + " printed no result");
  } catch (const Error& error) {
    // Keep the rows that came before the failure.
    empty.missing = "failed: " + cause_in(error.what(), program_name(one));
    rows.push_back(empty);
    errors_.push_back(fmt::format("{}: {}", one.name(), error.what()));
    failed_ = failed_ || one.program != Program::torch;
  }
  return rows;
}

std::vector<GpuRow> GpuBench::run(const std::vector<GpuMeasurement>& list,
                                  const std::function<void(const GpuRow&, const std::vector<GpuRow>&)>& on_row) {
  const std::vector<std::string> devices = launch::visible_devices(launch::own_environment());
  MANIPLE_REQUIRE(
      !devices.empty(),
      "bench gpu: there is no NVIDIA GPU here (no /dev/nvidia0, or CUDA_VISIBLE_DEVICES is empty); `maniple "
      "bench all_reduce` and `maniple bench ddp` measure the CPU");
  device_ = devices.front();
  const auto wants = [&](const auto& condition) { return std::any_of(list.begin(), list.end(), condition); };
  if (wants([](const GpuMeasurement& one) { return one.program == Program::torch; })) {
    progress_("which python3 has PyTorch with CUDA");
    for (const char* python : {"python3", "/usr/bin/python3", "python"}) {
      if (!python_.empty()) break;
      const char* const script =
          "import torch, torch.distributed as d; print(torch.cuda.is_available() and d.is_nccl_available())";
      if (python_says(python, script, watch_) == "True") python_ = python;
    }
  }
  if (wants([](const GpuMeasurement& one) { return one.subject == "nccl" || one.backend == "nccl"; }) &&
      !missing_plugin("nccl").empty()) {
    // PyTorch may have installed its own NCCL.
    const std::string folder =
        python_says("python3", "import nvidia.nccl as n; print(list(n.__path__)[0] + '/lib')", watch_);
    if (!folder.empty() && access((folder + "/libnccl.so.2").c_str(), R_OK) == 0) nccl_folder_ = folder;
  }
  std::vector<GpuRow> rows;
  for (const GpuMeasurement& one : list) {
    progress_(one.name());
    for (GpuRow& row : measure(one)) {
      rows.push_back(std::move(row));
      on_row(rows.back(), rows);
    }
  }
  return rows;
}

}  // namespace maniple::bench
