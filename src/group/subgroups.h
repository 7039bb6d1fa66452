// The topology of a group, from what the session knows of its ranks.
#pragma once

#include <vector>

#include "session/session.h"
#include <maniple/comm/topology.h>

namespace maniple {

/// `global_ranks` in the order of the group; the session's rank is among them.
Topology topology_of(const Session& session, const std::vector<int>& global_ranks);

}  // namespace maniple
