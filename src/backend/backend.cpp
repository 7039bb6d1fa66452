#include "backend/backend.h"

#include <fmt/format.h>

#include "backend/plugin/load.h"
#include "base/check.h"
#include "base/environment.h"

namespace maniple {
namespace {

std::string nothing_missing() { return {}; }

// A new backend is a line here. Plugins have a line in plugin/load.cpp as well.
constexpr BackendEntry kBackends[] = {
    {"native", "shared memory inside a host, TCP between hosts; needs nothing else", make_native_backend,
     nothing_missing},
    {"gloo", "Facebook's Gloo over TCP", make_gloo_backend, [] { return missing_plugin("gloo"); }},
    {"mpi", "the cluster's MPI: Open MPI or MPICH, under mpirun", make_mpi_backend,
     [] { return missing_plugin("mpi"); }},
    {"nccl", "NVIDIA GPUs", make_nccl_backend, [] { return missing_plugin("nccl"); }},
};

}  // namespace

std::span<const BackendEntry> backends() noexcept { return kBackends; }

const BackendEntry& find_backend(std::string_view name) {
  std::string names;
  for (const BackendEntry& entry : kBackends) {
    const std::string missing = entry.missing();
    if (entry.name == name) {
      if (entry.make != make_native_backend && knob_flag(Knob::encrypt)) {
        throw Unsupported(
            fmt::format("MANIPLE_ENCRYPT is 1, but backend \"{}\" sends data by itself, as it is; use the backend "
                        "native, or set MANIPLE_ENCRYPT=0",
                        name));
      }
      if (missing.empty()) return entry;
      throw Unsupported(fmt::format("backend \"{}\": {} (`maniple backends` shows what there is)", name, missing));
    }
    if (missing.empty()) names += (names.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw Unsupported(fmt::format("this build has no backend \"{}\"; it has {}", name, names));
}

}  // namespace maniple
