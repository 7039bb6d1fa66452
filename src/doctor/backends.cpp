#include "doctor/backends.h"

#include <fmt/format.h>

#include "doctor/system_files.h"

namespace maniple::doctor {
namespace {

std::string find_gloo() {
  for (const std::string& directory : library_directories()) {
    for (const std::string& name : names_in(directory)) {
      if (name.starts_with("libgloo.so")) return directory + "/" + name;
    }
  }
  return "";
}

}  // namespace

Findings judge(const BackendFacts& facts) {
  Findings findings;
  std::string here;
  std::string missing;
  std::string install;
  for (const Engine& engine : facts) {
    if (engine.found.empty()) {
      missing += (missing.empty() ? "" : ", ") + engine.name;
      install += (install.empty() ? "" : " ") + engine.install;
    } else {
      here += fmt::format("{}{} ({})", here.empty() ? "" : ", ", engine.name, engine.found);
    }
  }
  if (!here.empty()) findings.push_back({Verdict::ok, "installed: " + here});
  if (!missing.empty())
    findings.push_back(
        {Verdict::ok, fmt::format("not installed: {} (optional: apt-get install {})", missing, install)});
  return findings;
}

BackendFacts look_at_backends() {
  std::string open_mpi = find_program("mpirun.openmpi");
  if (open_mpi.empty()) open_mpi = find_program("mpirun");
  return {{"Open MPI", open_mpi, "openmpi-bin"},
          {"MPICH", find_program("mpirun.mpich"), "mpich"},
          {"Gloo", find_gloo(), "libgloo-dev"},
          {"Slurm", find_program("srun"), "slurm-client"},
          {"NCCL", find_library("libnccl.so.2"), "libnccl2"}};
}

}  // namespace maniple::doctor
