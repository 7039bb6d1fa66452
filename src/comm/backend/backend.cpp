#include "comm/backend/backend.h"

#include <algorithm>

#include <fmt/format.h>

#include "comm/backend/plugin/load.h"
#include "comm/base/check.h"
#include "comm/base/environment.h"

namespace maniple {
namespace {

std::string nothing_missing() { return {}; }

// To add a backend, add a line here, and for a plugin another in plugin/load.cpp.
constexpr BackendEntry kBackends[] = {
    {"native", "shared memory inside a host, TCP between hosts; needs nothing else", DeviceType::cpu,
     make_native_backend, nothing_missing},
    {"gloo", "Facebook's Gloo over TCP", DeviceType::cpu, make_gloo_backend, [] { return missing_plugin("gloo"); }},
    {"mpi", "the cluster's MPI: Open MPI or MPICH, under mpirun", DeviceType::cpu, make_mpi_backend,
     [] { return missing_plugin("mpi"); }},
    {"cuda", "NVIDIA GPUs that ranks share, or that reach each other in one host", DeviceType::cuda, make_cuda_backend,
     [] { return missing_plugin("cuda"); }},
    {"nccl", "NVIDIA GPUs, one for each rank, on any number of hosts", DeviceType::cuda, make_nccl_backend,
     [] { return missing_plugin("nccl"); }},
};

/// A backend is called only for memory that it serves.
[[noreturn]] void reject_unserved() { assertion_failed("backend.serves(device)", __FILE_NAME__, __LINE__); }

}  // namespace

void Backend::run(const Operation&, OperationContext&) { reject_unserved(); }
void Backend::start(std::span<const std::shared_ptr<Message>>, bool) { reject_unserved(); }
void Backend::drive(Message&) { reject_unserved(); }
Enqueued Backend::enqueue(std::span<Operation>, const StreamCall&) { reject_unserved(); }
std::vector<Work> Backend::enqueue_messages(std::span<const StreamMessage>, const StreamCall&) { reject_unserved(); }

Backend& choose_backend(std::span<const std::unique_ptr<Backend>> backends, std::span<const Operation> operations) {
  for (const auto& backend : backends) {
    const auto suits = [&](const Operation& op) { return backend->serves(op.device) && backend->can(op); };
    if (std::all_of(operations.begin(), operations.end(), suits)) return *backend;
  }
  reject_unserved();
}

RegisteredMemory Backend::allocate_shared(std::size_t, std::uint64_t, Deadline) {
  throw Unsupported("allocate_shared: this backend has no memory that ranks of a host share; the backend native has");
}

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

BackendChoice parse_backend(std::string_view text) {
  BackendChoice choice;
  if (text.find(':') == std::string_view::npos) {
    const BackendEntry& entry = find_backend(text);
    if (entry.device == DeviceType::cpu) return {&entry, nullptr, true};
    return {&find_backend("native"), &entry, false};
  }
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view part = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(part.size() + 1, rest.size()));
    const std::size_t colon = part.find(':');
    const std::string_view device = part.substr(0, colon);
    const std::string_view name = colon == std::string_view::npos ? "" : part.substr(colon + 1);
    const BackendEntry* const entry = device == "cpu" || device == "cuda" ? &find_backend(name) : nullptr;
    const BackendEntry*& place = device == "cpu" ? choice.host : choice.device;
    MANIPLE_REQUIRE(
        entry != nullptr && place == nullptr,
        "backend \"{}\": write a name (native, nccl, ...), or one for each device: \"cpu:native,cuda:nccl\"", text);
    MANIPLE_REQUIRE(device != "cpu" || entry->device == DeviceType::cpu,
                    "backend \"{}\": {} is for GPUs, not for the CPU", text, name);
    place = entry;
  }
  if (choice.host == nullptr) choice = {&find_backend("native"), choice.device, false};
  // "cuda:native" means through host memory, which a host backend does by itself.
  if (choice.device != nullptr && choice.device->device == DeviceType::cpu) {
    MANIPLE_REQUIRE(choice.device == choice.host, "backend \"{}\": GPU memory goes through {}; write \"{}\"", text,
                    choice.host->name, choice.host->name);
    choice.device = nullptr;
  }
  return choice;
}

}  // namespace maniple
