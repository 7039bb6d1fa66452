// Loads plugins on demand: finds their libraries, and reports which are installed and how to get the others.
//
// A library is searched for in the folder that MANIPLE_PLUGINS names; in libexec/maniple next to the program's bin/ (or
// two folders up, for programs in a folder of bin/); likewise next to the lib/ of libmaniple.so, if Maniple is a shared
// library; in the program's run path; and in the package's configured install folder. A library is loaded when a
// program first requests its backend, and never unloaded.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "comm/backend/backend.h"
#include "comm/backend/device/device_plugin.h"
#include "comm/backend/plugin/plugin.h"

namespace maniple {

/// The MPI that "mpi" stands for: MANIPLE_MPI, or the MPI whose launcher started this process; Open MPI otherwise.
std::string_view chosen_mpi();

/// Empty if the plugin's library is found; otherwise one line: what is missing and how to get it.
std::string missing_plugin(std::string_view backend);

/// "Open MPI v4.1.4, package: ..." if the library is found and loads; otherwise the reason.
std::string describe_plugin(std::string_view backend);

/// Loads the plugin, once per process. Throws Unsupported.
const PluginEntry& load_plugin(std::string_view backend);
const DevicePluginEntry& load_device_plugin(std::string_view backend);  ///< "cuda" or "nccl"

/// The GPU runtime, from the plugin "cuda". Throws Unsupported.
DeviceRuntime& device_runtime();

// A backend on top of a plugin: same operations, errors and messages as "native".

/// Makes a group's plugin, and the backend on top of it. Throws any error of setting up.
std::unique_ptr<Backend> make_plugin_backend(const BackendContext& context, const PluginEntry& entry);

}  // namespace maniple
