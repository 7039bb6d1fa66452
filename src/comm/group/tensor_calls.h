// What the functions on tensors need of a group, beyond ProcessGroup's interface.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include <maniple/comm/process_group.h>
#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// False on a rank outside the group: the operation then does nothing. The first such operation logs a warning.
bool takes_part(ProcessGroup& group, std::string_view operation);

/// Whether the group accepts CPU tensors (BackendChoice).
bool serves_host_tensors(ProcessGroup& group);

/// The GPU of this rank if the group's backend is for GPUs. The group then has registered memory there.
std::optional<Device> device_of(ProcessGroup& group);

/// Matches messages by tag from now on. A backend that matches messages in the order of the calls is bypassed: they go
/// through host memory. All ranks call it, before their first message.
void match_by_tags(ProcessGroup& group);

/// Returns a Work that completes when the stream's current contents do; `keep` lives until then.
Work mark(ProcessGroup& group, Device device, void* stream, std::shared_ptr<void> keep);

}  // namespace maniple
