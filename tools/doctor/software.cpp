#include "tools/doctor/checks.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

namespace maniple::doctor {
namespace {

struct Maker {
  const char* part_of_path;
  const char* name;
};
constexpr Maker kFast[] = {{"openblas", "OpenBLAS"},
                           {"mkl", "MKL"},
                           {"blis", "BLIS"},
                           {"armpl", "Arm Performance Libraries"},
                           {"nvpl", "NVPL"}};

std::string find_gloo() {
  for (const std::string& directory : library_directories()) {
    for (const std::string& name : names_in(directory)) {
      if (name.starts_with("libgloo.so")) return directory + "/" + name;
    }
  }
  return "";
}

/// Finds a CUDA runtime of any version in the dynamic linker's directories or where the toolkit's installer puts it.
std::string find_cuda_runtime() {
  std::vector<std::string> directories = library_directories();
  directories.emplace_back("/usr/local/cuda/lib64");
  for (const std::string& directory : directories) {
    for (const std::string& name : names_in(directory)) {
      if (name.starts_with("libcudart.so")) return real_path(directory + "/" + name);
    }
  }
  return "";
}

/// "2 x NVIDIA H200, NVIDIA T4"
std::string count_models(const std::vector<std::string>& models) {
  std::map<std::string, int> counts;
  for (const std::string& model : models) ++counts[model];
  std::string text;
  for (const auto& [model, count] : counts) {
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", count > 1 ? fmt::format("{} x ", count) : "", model);
  }
  return text;
}

}  // namespace

// --- blas ---

Findings judge(const BlasFacts& facts) {
  if (facts.path.empty()) {
    return {{Verdict::warn, "no libblas.so.3: Debian's LibTorch needs one (the one from pytorch.org brings its own)",
             "apt-get install libopenblas0-pthread"}};
  }
  for (const Maker& maker : kFast) {
    if (facts.path.find(maker.part_of_path) != std::string::npos)
      return {{Verdict::ok, fmt::format("{} ({})", maker.name, facts.path)}};
  }
  const bool atlas = facts.path.find("atlas") != std::string::npos;
  return {{Verdict::warn,
           fmt::format("libblas.so.3 is {} ({}): matrices are multiplied up to 20 times slower",
                       atlas ? "ATLAS" : "the reference BLAS", facts.path),
           "apt-get install libopenblas0-pthread (then: update-alternatives --display libblas.so.3-$(gcc "
           "-print-multiarch))"}};
}

// Does not load the library, because OpenBLAS starts its threads on loading.
BlasFacts inspect_blas() { return {.path = find_library("libblas.so.3")}; }

// --- gpus ---

std::string parse_driver_version(const std::string& text) {
  for (const std::string& word : split(text.substr(0, text.find('\n')), ' ')) {
    const bool dotted = word.find('.') != std::string::npos;
    if (dotted &&
        std::all_of(word.begin(), word.end(), [](unsigned char c) { return std::isdigit(c) != 0 || c == '.'; }))
      return word;
  }
  return "";
}

std::string parse_gpu_model(const std::string& text) {
  for (const std::string& line : split(text, '\n')) {
    if (!line.starts_with("Model:")) continue;
    const auto begin = line.find_first_not_of(" \t", 6);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

Findings judge(const GpuFacts& facts) {
  if (facts.devices == 0) {
    if (facts.driver.empty()) return {{Verdict::ok, "no NVIDIA GPU: training runs on the cores"}};
    return {{Verdict::warn, fmt::format("NVIDIA driver {} is loaded, but there is no /dev/nvidia0", facts.driver),
             "start the container with --gpus all; on the machine itself run nvidia-modprobe"}};
  }
  Findings findings;
  if (facts.driver.empty()) {
    findings.push_back(
        {Verdict::fail, fmt::format("{} GPU(s), but no NVIDIA driver is loaded", facts.devices), "modprobe nvidia"});
  } else {
    const std::string models = facts.models.empty() ? "" : fmt::format(" ({})", count_models(facts.models));
    findings.push_back({Verdict::ok, fmt::format("{} GPU(s){}, driver {}", facts.devices, models, facts.driver)});
  }
  if (!facts.refused.empty()) {
    findings.push_back({Verdict::fail, fmt::format("this user may not open {}", fmt::join(facts.refused, ", ")),
                        "check the permissions of /dev/nvidia*; usually the group video or render is needed"});
  }
  if (!facts.has_uvm) {
    findings.push_back({Verdict::fail, "there is no /dev/nvidia-uvm: CUDA does not start",
                        "run nvidia-modprobe -u -c 0 as root; a container gets it with --gpus all"});
  }
  if (!facts.has_cuda) {
    findings.push_back({Verdict::fail, "libcuda.so.1 is missing: no program can use the GPUs",
                        "install the driver's user-space part, in the same version"});
  }
  if (facts.visible_is_set && (facts.visible.empty() || facts.visible == "-1")) {
    findings.push_back({Verdict::warn, "CUDA_VISIBLE_DEVICES hides all GPUs", "unset CUDA_VISIBLE_DEVICES"});
  }
  const auto tell = [&](const std::string& path, const char* there, const char* missing) {
    findings.push_back({Verdict::ok, path.empty() ? missing : fmt::format("{}: {}", there, path)});
  };
  tell(facts.mps, "MPS, for several ranks on one GPU (maniple run --share-gpu)",
       "no nvidia-cuda-mps-control: ranks on one GPU take turns (optional: apt-get install nvidia-cuda-mps, of "
       "the "
       "driver's version)");
  tell(facts.nccl, "NCCL", "no libnccl.so.2 (optional: apt-get install libnccl2)");
  tell(facts.toolkit, "CUDA runtime",
       "no libcudart.so: LibTorch of pytorch.org brings its own (optional, to build: apt-get install "
       "nvidia-cuda-toolkit)");
  return findings;
}

GpuFacts inspect_gpus() {
  GpuFacts facts;
  std::vector<std::string> names;
  for (const std::string& name : names_in("/dev")) {
    const bool device = name.size() > 6 && name.starts_with("nvidia") &&
                        std::all_of(name.begin() + 6, name.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
    if (!device) continue;
    ++facts.devices;
    names.push_back("/dev/" + name);
  }
  if (facts.devices > 0) {
    for (const char* name : {"/dev/nvidiactl", "/dev/nvidia-uvm"}) names.emplace_back(name);
    facts.has_uvm = ::access("/dev/nvidia-uvm", F_OK) == 0;
  }
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    if (::access(name.c_str(), R_OK | W_OK) != 0 && errno != ENOENT) facts.refused.push_back(name);
  }
  const std::string gpus = "/proc/driver/nvidia/gpus/";
  for (const std::string& bus : names_in(gpus)) {
    const std::string model = parse_gpu_model(read_small_file(gpus + bus + "/information").value_or(""));
    if (!model.empty()) facts.models.push_back(model);
  }
  facts.driver = parse_driver_version(read_small_file("/proc/driver/nvidia/version").value_or(""));
  facts.has_cuda = !find_library("libcuda.so.1").empty();
  facts.mps = find_program("nvidia-cuda-mps-control");
  facts.nccl = find_library("libnccl.so.2");
  facts.toolkit = find_cuda_runtime();
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  facts.visible_is_set = visible != nullptr;
  facts.visible = visible != nullptr ? visible : "";
  return facts;
}

// --- backends ---

Findings judge(const BackendFacts& facts) {
  Findings findings;
  std::string here;
  std::string missing;
  std::string install;
  for (const InstalledBackend& backend : facts) {
    if (backend.found.empty()) {
      missing += (missing.empty() ? "" : ", ") + backend.name;
      install += (install.empty() ? "" : " ") + backend.install;
    } else {
      here += fmt::format("{}{} ({})", here.empty() ? "" : ", ", backend.name, backend.found);
    }
  }
  if (!here.empty()) findings.push_back({Verdict::ok, "installed: " + here});
  if (!missing.empty())
    findings.push_back(
        {Verdict::ok, fmt::format("not installed: {} (optional: apt-get install {})", missing, install)});
  return findings;
}

BackendFacts inspect_backends() {
  std::string open_mpi = find_program("mpirun.openmpi");
  if (open_mpi.empty()) open_mpi = find_program("mpirun");
  return {{"Open MPI", open_mpi, "openmpi-bin"},
          {"MPICH", find_program("mpirun.mpich"), "mpich"},
          {"Gloo", find_gloo(), "libgloo-dev"},
          {"Slurm", find_program("srun"), "slurm-client"}};
}

}  // namespace maniple::doctor
