// A launcher that was started several times by another one (mpirun, srun): each would start a job of its own.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace maniple::cli {

/// A warning, from the first of several `maniple run -n PROCESSES` on one node that mpirun or srun has started
/// together; empty if there is nothing to say. `variable` reads the environment. Pure.
std::string outer_launcher_warning(const std::function<std::optional<std::string>(const char*)>& variable,
                                   int processes);

}  // namespace maniple::cli
