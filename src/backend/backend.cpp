#include "backend/backend.h"

#include "base/check.h"

namespace maniple {
namespace {

constexpr BackendEntry kBackends[] = {
    {"native", "shared memory inside a host, TCP between hosts; needs nothing else", make_native_backend},
};

}  // namespace

std::span<const BackendEntry> backends() noexcept { return kBackends; }

const BackendEntry& find_backend(std::string_view name) {
  std::string names;
  for (const BackendEntry& entry : kBackends) {
    if (entry.name == name) return entry;
    names += (names.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw Unsupported(fmt::format("this build has no backend \"{}\"; it has {}", name, names));
}

}  // namespace maniple
