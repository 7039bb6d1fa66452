// Memory that a group's ranks on one host all map.
//
// Get it from `ProcessGroup::allocate`. Any part of it can be passed to any operation of that group like ordinary
// memory; operations recognise it by its address and then work on it where it lies. Operations of other groups treat it
// as ordinary memory. It is backed by an anonymous file handed over a socket: it has no name, and nothing is left
// behind when a process is killed.
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
  std::size_t size() const noexcept { return size_; }  ///< bytes, as asked for

  /// Typed view of `count` elements from byte `offset` on; the caller keeps to the size and to T's alignment.
  template <class T>
  std::span<T> as(std::size_t count, std::size_t offset = 0) const noexcept {
    return {reinterpret_cast<T*>(static_cast<std::byte*>(data_) + offset), count};
  }

  /// internal: `owner` keeps the mapping alive.
  RegisteredMemory(void* data, std::size_t size, std::shared_ptr<void> owner)
      : data_(data), size_(size), owner_(std::move(owner)) {}

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
  std::shared_ptr<void> owner_;
};

}  // namespace maniple
