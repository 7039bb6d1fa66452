// Checks of the environment before a rank contacts another: a variable that is wrong is named at once, by the rank
// that has it, and not by a broken connection on all others.
#pragma once

#include <string>

#include "comm/base/environment.h"
#include <maniple/comm/options.h>

namespace maniple {

/// Throws InvalidArgument that names all knobs which hold something that is not permitted.
/// `here`: the environment is for ranks on this machine, so that what it names (interface, congestion control) must
/// exist.
void require_good_knobs(const ReadVariable& read, bool here = true);

/// The above for this process, and a warning of unknown variables from one rank of each host.
void check_environment(const InitOptions& options);

}  // namespace maniple
