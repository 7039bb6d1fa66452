// The memory of the other ranks of this host, where it lies: one copy by the kernel (process_vm_readv) in place of two
// through a stage.
//
// Nothing needs to be set up; but it may be forbidden (containers, ptrace_scope), and a process number means another
// process in another container. So a rank shows, beside its number, where a random word of its lies, and whoever reads
// from it looks for that word first. Memory that cannot be read is no error: the caller takes another way.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace maniple {

class PeerMemory {
 public:
  /// In shared memory, written before the first publication of its rank.
  struct Identity {
    std::int32_t process;
    std::uint64_t address;  ///< of `word` in that process
    std::uint64_t word;
  };

  explicit PeerMemory(int size) : known_(static_cast<std::size_t>(size)) {}
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  /// Of this rank; allows its siblings to read, where the system asks for that.
  Identity identify();

  /// Copies from a rank's memory to this one's. False if that is impossible, for now or for ever.
  bool read(int rank, const Identity& identity, void* to, std::uint64_t from, std::size_t bytes);

 private:
  std::uint64_t word_ = 0;
  std::vector<bool> known_;  // ranks that are who they say
};

}  // namespace maniple
