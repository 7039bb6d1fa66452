// Other engines that are installed: launchers and libraries. All of them are optional.
#pragma once

#include <string>
#include <vector>

#include "doctor/finding.h"

namespace maniple::doctor {

struct Engine {
  std::string name;   ///< "Open MPI"
  std::string found;  ///< path; empty: not there
  std::string install;
};
using BackendFacts = std::vector<Engine>;

Findings judge(const BackendFacts& facts);
BackendFacts look_at_backends();

}  // namespace maniple::doctor
