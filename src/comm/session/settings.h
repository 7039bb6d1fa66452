// Settings that must be alike on all ranks: the knobs of scope world, and what programs pass to init() instead. Pure.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "comm/base/environment.h"

namespace maniple {

struct Setting {
  std::string name;
  std::string value;  ///< canonical: equal texts mean the same
};
using Settings = std::vector<Setting>;

/// What the program has chosen, which counts instead of the environment. Only for knobs that options of init()
/// override.
struct ChosenSettings {
  std::map<Knob, std::string> knobs = {};
  std::string backend = {};
};

/// Those of this process, the version of the library first.
Settings settings_of_this_rank(const ChosenSettings& chosen);

/// Whether they come from a process that has this version of the library.
bool of_this_version(const Settings& settings) noexcept;

struct SettingsOf {
  std::string host;
  std::string description;  ///< "rank 3 (pid 4711 on node7)"
  Settings settings;
};
/// By rank. "MANIPLE_HEARTBEAT is 2.5 on ranks 0-2 (node1, node2) but 60 on rank 3 (pid 4711 on node7); it must be
/// alike on all ranks", for each that differs; empty: none does.
std::string difference(const std::vector<SettingsOf>& ranks);

}  // namespace maniple
