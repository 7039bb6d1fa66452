// Groups that somebody else has named and chosen the ranks of, as a binding for another library (maniple/c.h) needs
// them.
#pragma once

#include <memory>
#include <span>
#include <string>

#include <maniple/comm/process_group.h>

namespace maniple {

/// init() over a store, with the group's name for messages. `master`: a host that all ranks reach, by which the
/// interface for data is chosen; empty: loopback. The secret is the launcher's if there is one, otherwise one that the
/// store carries.
std::shared_ptr<ProcessGroup> init_named(std::shared_ptr<Store> store, const InitOptions& options,
                                         const std::string& name, const std::string& master);

/// Like ProcessGroup::new_group, but only the ranks that are in the group call it: the parent's others have no part in
/// it, and nobody compares the lists. `name` is one that no group of the world has had before.
std::shared_ptr<ProcessGroup> make_named_group(ProcessGroup& parent, const std::string& name,
                                               std::span<const int> ranks, const GroupOptions& options);

}  // namespace maniple
