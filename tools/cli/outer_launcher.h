// Detects that mpirun or srun has started `maniple run` several times: each copy would start a job of its own.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace maniple::cli {

/// The warning, if this is the first of several `maniple run -n PROCESSES` that mpirun or srun has started together on
/// one node; otherwise empty. `variable` reads the environment. Pure.
std::string outer_launcher_warning(const std::function<std::optional<std::string>(const char*)>& variable,
                                   int processes);

}  // namespace maniple::cli
