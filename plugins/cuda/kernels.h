// The kernels, their arguments, and the flags that synchronise the ranks.
//
// A group operation consists of these steps, on every rank and in stream order:
//
//   enter    a kernel: for ordinary memory, copies the data that peers read into this rank's slot; clears this rank's
//            `done` bytes; writes to every peer a word that identifies the call and locates the data, then sets the
//            peer's `ready` byte for this rank
//   wait     until all of this rank's `ready` bytes are set
//   work     a kernel: compares the words; reads from the peers, writes `out`; clears this rank's `ready` bytes; sets
//            the peers' `done` bytes
//   wait     until all of this rank's `done` bytes are set: from then on no peer accesses this rank's memory
//
// All values are constants, so that a CUDA graph can replay an operation. No flag is lost or seen twice:
// - A peer sets its next `ready` byte here only after its wait for `done`. That wait needs this rank's `done`, which is
//   set after this rank has cleared `ready`.
// - A peer sets its next `done` byte here only after it has seen this rank's next `ready`, which is set after this rank
//   has cleared `done`.
//
// If one rank can reach all memory of the operation and all ranks are on one device, rank 0 does all the work (`lead`):
// the other ranks write their word to the leader and wait for `lead_done`.
//
// There are two ways to wait. If the ranks' kernels run concurrently (MPS, or one device per rank), the last block of a
// kernel waits for flags in device memory. Otherwise contexts take turns on the device, and a waiting kernel would hold
// up the others for milliseconds; then the stream waits for flags in host memory. An abort is always a word in host
// memory, because all queues to the device may be blocked by waiting streams. It is read across PCIe, so at most one
// block reads it, and only during long waits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace maniple::cuda_plugin {

inline constexpr int kMostRanks = 64;

/// The flags of one rank: at the start of its arena if kernels wait, in host memory if streams wait. Element i is set
/// only by peer i.
struct Flags {
  std::uint8_t ready[kMostRanks];
  std::uint8_t done[kMostRanks];
  std::uint64_t lead_ready[kMostRanks];  // used on the leader: words, written by the other ranks
  std::uint64_t lead_done;               // used on the other ranks
};

/// State of one rank in its arena, read by every block of a kernel.
struct DeviceState {
  std::uint64_t words[kMostRanks];  // from the peers; cleared after use, so that none counts twice
  std::uint32_t stopped;            // a kernel of this rank has seen `stop`: later kernels do nothing
  std::uint32_t blocks;             // blocks of the running kernel that have finished
};
inline constexpr std::size_t kFlagsBytes = 4096;
inline constexpr std::size_t kStateOffset = 2048;  // in the arena
static_assert(sizeof(Flags) <= kStateOffset && kStateOffset + sizeof(DeviceState) <= kFlagsBytes);

/// The word that a rank writes to another rank. Bit 0 is set; then follow 40 bits with the offset of the data to read
/// and 23 bits of the call's hash.
constexpr std::uint64_t make_word(std::uint64_t hash, std::uint64_t offset) noexcept {
  return (hash >> 41) << 41 | (offset & ((std::uint64_t{1} << 40) - 1)) << 1 | 1;
}

#ifdef __CUDACC__
#define MANIPLE_HOST_AND_DEVICE __host__ __device__
#else
#define MANIPLE_HOST_AND_DEVICE
#endif
MANIPLE_HOST_AND_DEVICE constexpr std::uint32_t hash_in(std::uint64_t word) noexcept {
  return static_cast<std::uint32_t>(word >> 41);
}
MANIPLE_HOST_AND_DEVICE constexpr std::uint64_t offset_in(std::uint64_t word) noexcept {
  return word >> 1 & ((std::uint64_t{1} << 40) - 1);
}

/// One per rank, in host memory.
struct HostRecord {
  std::uint64_t seq;                 // Operation::seq of a differing call that the rank's kernels found
  std::uint32_t mismatch;            // written after `seq`
  std::uint32_t stop;                // the group was aborted (a StopReason): do nothing, and leave the flags unchanged
  std::uint8_t awaited[kMostRanks];  // peers that a kernel has been waiting for
};
enum StopReason : std::uint32_t { kRunning = 0, kAborted = 1, kAbortedByAnother = 2 };

struct Piece {
  const std::byte* from;
  std::byte* to;
  std::size_t bytes;
};

// Arguments are small, because every 100 bytes of arguments slow down a launch. Data of the ranks therefore lies at
// constant strides.

/// The synchronisation between ranks around a kernel.
struct Signal {
  std::byte* flags;         ///< rank 0's Flags, at this process's address
  std::size_t flags_apart;  ///< stride in bytes between the flags of consecutive ranks
  std::byte* states;        ///< rank 0's DeviceState
  std::size_t states_apart;
  HostRecord* record;    ///< this rank's record
  std::uint64_t active;  ///< bit mask of the peers that take part in this round; excludes this rank
  int rank;
  int ranks;
  bool in_kernel;   ///< kernels wait, not streams
  bool one_device;  ///< flags and data are all in one device's memory
};

struct EnterArguments {
  Signal signal;
  std::uint64_t words[kMostRanks];  ///< the word for each peer
  Piece pieces[kMostRanks];         ///< data to copy into the slot
  int piece_count;
};

/// The source of rank i is `base` + i x `apart` + the offset in that rank's word. This rank's own source is `own`.
struct WorkArguments {
  Signal signal;
  const std::byte* base;
  std::size_t apart;
  const std::byte* own;  ///< null: none
  std::uint64_t seq;
  bool lead;   ///< rank 0 works for all ranks: the kernel clears lead_ready and sets lead_done
  bool waits;  ///< lead: each block waits for the peers by itself; only if there are few blocks
};

/// Copies the data of rank i to `to[i]`.
struct CopyArguments : WorkArguments {
  std::uint32_t expected[kMostRanks];  ///< hash_in() of each peer's word
  std::byte* to[kMostRanks];
  std::size_t bytes[kMostRanks];
};

/// Reduces the data of all ranks, in rank order, into `out` or, if `in_place`, into all sources.
struct ReduceArguments : WorkArguments {
  std::uint32_t expected;  ///< hash_in() of every peer's word
  std::byte* out;
  std::size_t first;  ///< in_place: reduces the elements [first, first + count)
  std::size_t count;  ///< elements; 0: nothing to reduce
  double factor;
  int divide_by;
  bool in_place;
  bool premultiply;
  bool enters;              ///< one block, and kernels wait: the kernel also does the work of `enter`
  std::uint64_t word;       ///< `enters`: the word for rank 0
  std::uint64_t word_step;  ///< `enters`: difference between the words for consecutive ranks
  Piece piece;
};

/// The message of a rank that does not lead to the leader.
struct FollowArguments {
  Signal signal;
  std::uint64_t word;
};

/// Call before the first launch on a device.
void load_kernels();
bool is_one_block(std::size_t bytes);  ///< whether one block does a reduction of `bytes`
/// Whether `bytes` of work take so few blocks that all of them may wait for other ranks.
bool may_wait(std::size_t bytes);
void launch_follow(const FollowArguments& arguments, cudaStream_t stream);
/// Waits until all peers have written their word to the leader.
void launch_await(const Signal& signal, cudaStream_t stream);
void launch_enter(const EnterArguments& arguments, cudaStream_t stream);
void launch_copy(const CopyArguments& arguments, cudaStream_t stream);
/// `dtype` and `kind` are the numbers of DType and ReduceOp::Kind: types.h needs C++20, which CUDA 11's nvcc lacks.
void launch_reduce(const ReduceArguments& arguments, int dtype, int kind, cudaStream_t stream);

}  // namespace maniple::cuda_plugin
