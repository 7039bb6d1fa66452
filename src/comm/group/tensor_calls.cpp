#include "comm/group/tensor_calls.h"

#include "comm/group/group_impl.h"

namespace maniple {

bool takes_part(ProcessGroup& group, std::string_view operation) { return group.impl().takes_part(operation); }

bool serves_host_tensors(ProcessGroup& group) { return group.impl().serves_host_tensors(); }

std::optional<Device> device_of(ProcessGroup& group) {
  if (!group.impl().has_device_engine()) return std::nullopt;
  return Device::cuda(group.impl().device());
}

void match_by_tags(ProcessGroup& group) { group.impl().match_by_tags(); }

Work mark(ProcessGroup& group, Device device, void* stream, std::shared_ptr<void> keep) {
  return group.impl().mark(device, stream, std::move(keep));
}

}  // namespace maniple
