#include "topology/host_identity.h"

#include <unistd.h>

#include <array>
#include <climits>
#include <fstream>

#include "base/environment.h"

namespace maniple {
namespace {

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string link_target(const char* path) {
  std::array<char, 64> text{};
  const auto length = ::readlink(path, text.data(), text.size());
  return length > 0 ? std::string(text.data(), static_cast<std::size_t>(length)) : std::string();
}

}  // namespace

HostIdentity host_identity() {
  HostIdentity host;
  std::array<char, HOST_NAME_MAX + 1> name{};
  ::gethostname(name.data(), name.size() - 1);
  host.name = name.data();
  const std::string claimed = knob_text(Knob::host);
  if (!claimed.empty()) {
    host.key.assign("claimed:").append(claimed);
    host.name = claimed;
    return host;
  }
  host.key = first_line("/proc/sys/kernel/random/boot_id");
  for (const char* space : {"/proc/self/ns/net", "/proc/self/ns/ipc", "/proc/self/ns/user"}) {
    host.key.append(1, ',').append(link_target(space));
  }
  return host;
}

}  // namespace maniple
