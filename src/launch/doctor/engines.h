// Other engines that are installed: launchers and libraries. All of them are optional.
#pragma once

#include <string>
#include <vector>

#include "launch/doctor/finding.h"

namespace maniple::doctor {

struct Engine {
  std::string name;   ///< "Open MPI"
  std::string found;  ///< path; empty: not there
  std::string install;
};
using EngineFacts = std::vector<Engine>;

Findings judge(const EngineFacts& facts);
EngineFacts look_at_engines();

}  // namespace maniple::doctor
