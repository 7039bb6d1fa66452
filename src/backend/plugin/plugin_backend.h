// A backend whose bytes travel by another engine: every operation, errors and messages as with "native".
#pragma once

#include <memory>

#include "backend/backend.h"
#include "backend/plugin/plugin.h"

namespace maniple {

/// Makes the plugin of a group. Throws what setting up can throw.
std::unique_ptr<Backend> make_plugin_backend(const BackendContext& context, const PluginEntry& plugin);

}  // namespace maniple
