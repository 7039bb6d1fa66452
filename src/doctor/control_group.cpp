#include "doctor/control_group.h"

#include "doctor/system_files.h"

namespace maniple::doctor {

GroupPaths control_group_paths(std::string_view text) {
  const std::string root = "/sys/fs/cgroup";
  GroupPaths paths{.unified = root, .memory = root + "/memory", .cpu = root + "/cpu"};
  for (const std::string& line : split(text, '\n')) {
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1) == "/" ? "" : line.substr(second + 1);
    if (controllers.empty()) paths.unified = root + path;
    for (const std::string& controller : split(controllers, ',')) {
      if (controller == "memory") paths.memory = root + "/memory" + path;
      if (controller == "cpu") paths.cpu = root + "/cpu" + path;
    }
  }
  return paths;
}

}  // namespace maniple::doctor
