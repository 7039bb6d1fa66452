// Which checkpoint of a folder is loaded: the newest one that is whole.
#pragma once

#include <cstdint>
#include <string>

#include <maniple/comm/process_group.h>
#include <maniple/train/checkpoint.h>

namespace maniple {

/// The step of LoadOptions, or else of the newest whole checkpoint; -1 if there are none. Throws if there are some but
/// none is usable.
std::int64_t choose_checkpoint(const std::string& folder, const LoadOptions& load);

/// The same, but the ranks divide the files to verify. Collective.
std::int64_t choose_checkpoint_together(const std::string& folder, const LoadOptions& load, ProcessGroup& ranks);

}  // namespace maniple
