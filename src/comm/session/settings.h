// Settings that must be alike on all ranks: the knobs of scope world, and their counterparts in init()'s options. No
// I/O.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "comm/base/environment.h"

namespace maniple {

struct Setting {
  std::string name;
  std::string value;  ///< canonical text: equal settings have equal texts
};
using Settings = std::vector<Setting>;

/// The program's own choices, which override the environment. Only for knobs that have an option in init().
struct ChosenSettings {
  std::map<Knob, std::string> knobs = {};
  std::string backend = {};
};

/// This process's settings, the library's version first.
Settings settings_of_this_rank(const ChosenSettings& chosen);

/// Whether the settings come from a process with this library version.
bool of_this_version(const Settings& settings) noexcept;

struct SettingsOf {
  std::string host;
  std::string description;  ///< "rank 3 (pid 4711 on node7)"
  Settings settings;
};
/// Describes each setting that differs between `ranks` (indexed by rank): "MANIPLE_HEARTBEAT is 2.5 on ranks 0-2
/// (node1, node2) but 60 on rank 3 (pid 4711 on node7); it must be alike on all ranks". Empty if none differs.
std::string difference(const std::vector<SettingsOf>& ranks);

}  // namespace maniple
