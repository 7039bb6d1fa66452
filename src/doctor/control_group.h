// Where the kernel shows the limits of this process's control group: both versions.
#pragma once

#include <string>
#include <string_view>

namespace maniple::doctor {

struct GroupPaths {
  std::string unified;  ///< version 2
  std::string memory;   ///< version 1
  std::string cpu;
};

/// From the text of /proc/self/cgroup: lines "0::/path" and "4:cpu,cpuacct:/path".
GroupPaths control_group_paths(std::string_view text);

}  // namespace maniple::doctor
