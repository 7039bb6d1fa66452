// The plugins, loaded on demand: where their libraries are, which of them are installed, how to get the others.
//
// A library is looked for in the folder that MANIPLE_PLUGINS names, in libexec/maniple beside the program's bin/ (or
// two folders up, for programs in a folder of bin/), in the same way beside the lib/ of libmaniple.so where Maniple is
// a shared library, in the program's run path, and where the package was configured to be installed. Nothing is loaded
// before a program asks for the backend, and nothing is unloaded.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "comm/backend/backend.h"
#include "comm/backend/device/device_plugin.h"
#include "comm/backend/plugin/plugin.h"

namespace maniple {

/// Which MPI "mpi" means here: MANIPLE_MPI says so, or the launcher that started this process; Open MPI otherwise.
std::string_view chosen_mpi();

/// Empty when the plugin's library is found; otherwise one line: what is missing and how to get it.
std::string missing_plugin(std::string_view backend);

/// "Open MPI v4.1.4, package: ..." of a library that is found and can be loaded; the reason otherwise.
std::string describe_plugin(std::string_view backend);

/// Loads it, once for a process. Throws Unsupported.
const PluginEntry& load_plugin(std::string_view backend);
const DevicePluginEntry& load_device_plugin(std::string_view backend);  ///< "cuda" or "nccl"

/// The runtime of the GPUs, from the plugin "cuda". Throws Unsupported.
DeviceRuntime& device_runtime();

// A backend that runs over a plugin: every operation, errors and messages as with "native".

/// Makes the plugin of a group, and the backend on it. Throws what setting up can throw.
std::unique_ptr<Backend> make_plugin_backend(const BackendContext& context, const PluginEntry& entry);

}  // namespace maniple
