// Checks the environment before a rank contacts another, so that the rank with a wrong variable reports it at once.
// Otherwise all other ranks would see only a broken connection.
#pragma once

#include <string>

#include "comm/base/environment.h"
#include <maniple/comm/options.h>

namespace maniple {

/// Throws InvalidArgument that names every knob with an invalid value. `here`: the environment is for ranks on this
/// machine, so the interface and congestion control that it names must exist.
void require_good_knobs(const ReadVariable& read, bool here = true);

/// Checks this process's knobs; one rank per host also warns of unknown variables.
void check_environment(const InitOptions& options);

}  // namespace maniple
