// Writes all bytes to a descriptor, continuing after partial writes and EINTR.
//
//   if (write_all(fd, text) != text.size()) throw_system_error("write " + path);
//
// Each function returns the number of bytes written. When that is less than the size, errno has the reason, for example
// EAGAIN from a full non-blocking descriptor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// write(2).
[[nodiscard]] std::size_t write_all(int fd, std::string_view bytes) noexcept;

/// pwrite(2) starting at `offset`.
[[nodiscard]] std::size_t write_all_at(int fd, std::string_view bytes, std::uint64_t offset) noexcept;

/// send(2) with MSG_NOSIGNAL and `flags`: fails with EPIPE if the peer is gone.
[[nodiscard]] std::size_t send_all(int socket, std::string_view bytes, int flags = 0) noexcept;

}  // namespace maniple
