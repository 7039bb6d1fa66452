// Groups whose names and ranks the caller chooses, as bindings for other libraries (maniple/c.h) need.
#pragma once

#include <memory>
#include <span>
#include <string>

#include <maniple/comm/process_group.h>

namespace maniple {

/// init() over a store; `name` appears in messages. `master`: a host that all ranks reach, which selects the interface
/// for data; empty: loopback. The secret is the launcher's if it set one, otherwise one carried by the store.
std::shared_ptr<ProcessGroup> init_named(std::shared_ptr<Store> store, const InitOptions& options,
                                         const std::string& name, const std::string& master);

/// Like ProcessGroup::new_group, but only the new group's ranks call it; the parent's other ranks take no part, and the
/// rank lists are not compared. `name` must be unique among all groups the world has ever had.
std::shared_ptr<ProcessGroup> make_named_group(ProcessGroup& parent, const std::string& name,
                                               std::span<const int> ranks, const GroupOptions& options);

}  // namespace maniple
