// RegisteredMemory: memory that all ranks of a group on one host map, so that collectives on it copy nothing.
//
//   maniple::RegisteredMemory memory = group->allocate(count * sizeof(float));
//   std::span<float> gradients = memory.as<float>(count);
//   group->all_reduce(buffer_of(gradients));
//
// Pass any part of it to any operation of the group that allocated it, like ordinary memory: the operation recognises
// the address and works in place. Operations of other groups treat it as ordinary memory.
//
// Lifetime: copies of a handle share the memory; see ProcessGroup::allocate for when it is freed. The memory is backed
// by an anonymous file passed over a socket: it has no name, so a killed process leaves nothing behind.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

class RegisteredMemory {
 public:
  RegisteredMemory() = default;
  void* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }  ///< bytes, as requested

  /// Typed view of `count` elements, starting at byte `offset`. Neither the size nor T's alignment is checked.
  template <class T>
  std::span<T> as(std::size_t count, std::size_t offset = 0) const noexcept {
    return {reinterpret_cast<T*>(static_cast<std::byte*>(data_) + offset), count};
  }

  /// internal; `owner` keeps the mapping alive
  RegisteredMemory(void* data, std::size_t size, std::shared_ptr<void> owner)
      : data_(data), size_(size), owner_(std::move(owner)) {}

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
  std::shared_ptr<void> owner_;
};

}  // namespace maniple
