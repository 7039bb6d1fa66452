// A backend that runs over a plugin: every operation, errors and messages as with "native".
#pragma once

#include <memory>

#include "backend/backend.h"
#include "backend/plugin/plugin.h"

namespace maniple {

/// Makes the plugin of a group, and the backend on it. Throws what setting up can throw.
std::unique_ptr<Backend> make_plugin_backend(const BackendContext& context, const PluginEntry& entry);

}  // namespace maniple
