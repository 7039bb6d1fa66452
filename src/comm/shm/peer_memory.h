// Reads the memory of the other ranks of this host in place: one copy by the kernel (process_vm_readv) instead of two
// through a stage.
//
// It needs no setup, but may be forbidden (containers, ptrace_scope), and the same pid may be a different process in
// another container. So each rank publishes its pid together with the address of a random word. A reader first checks
// for that word. Unreadable memory is not an error: the caller uses another method.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace maniple {

class PeerMemory {
 public:
  /// Lives in shared memory; written before its rank's first publication.
  struct Identity {
    std::int32_t process;
    std::uint64_t address;  ///< address of `word` in that process
    std::uint64_t word;
  };

  explicit PeerMemory(int size) : known_(size) {}
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  /// Returns this rank's identity, and permits its siblings to read if the system requires that.
  Identity identify();

  /// Copies from a rank's memory to this rank's. Returns false if that is impossible, temporarily or permanently.
  bool read(int rank, const Identity& identity, void* to, std::uint64_t from, std::size_t bytes);

 private:
  std::uint64_t word_ = 0;
  std::vector<bool> known_;  // ranks whose identity was verified
};

}  // namespace maniple
