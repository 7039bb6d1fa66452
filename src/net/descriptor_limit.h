// The limit of open files of this process.
#pragma once

#include <cstdint>
#include <string>

namespace maniple {

/// Raises the soft limit to the hard one. True if that gave more descriptors.
bool raise_descriptor_limit() noexcept;

struct DescriptorUse {
  std::uint64_t open = 0;
  std::uint64_t limit = 0;
};
DescriptorUse descriptor_use() noexcept;

/// For the error after raising did not help: "1024 descriptors are open and the limit is 1024; ...".
std::string descriptor_shortage(std::uint64_t needed_more = 1);

}  // namespace maniple
