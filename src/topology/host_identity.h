// Which host this process is on, by fact: the kernel's boot id and the namespaces that decide whether memory can be shared.
#pragma once

#include <string>

namespace maniple {

struct HostIdentity {
  std::string key;   ///< equal exactly for processes that can share memory with each other
  std::string name;  ///< for people
};

/// MANIPLE_HOST overrides the key (tests that want several hosts on one).
HostIdentity host_identity();

}  // namespace maniple
