// The kernels: what they are told, and the flags by which ranks order each other.
//
// An operation of a group is, on every rank and in the order of its stream:
//
//   enter    a kernel: copies what others are to read into the own slot (ordinary memory), clears the own `done` bytes,
//            writes to every peer the word that says what is called and where its data is, and then the peer's `ready`
//            byte
//   wait     until all own `ready` bytes are set
//   work     a kernel: compares the words; reads from the peers, writes `out`; clears the own `ready` bytes; sets the
//            peers' `done`
//   wait     until all own `done` bytes are set: nobody reads or writes this rank's memory any more
//
// All values are constants, so that a graph can replay it. That is safe: a peer sets its next `ready` here only after
// its wait for `done`, for which it needs mine, which I set after I cleared `ready`: so none is lost, and none is seen
// twice. And it sets its next `done` here only after it has seen my next `ready`, which I set after I cleared `done`.
//
// Where one rank can reach all memory there is and all are on one device, one of them does all the work (`lead`): the
// others write their word to the leader and wait for `lead_done`.
//
// There are two ways to wait. Where kernels of all ranks run side by side (MPS, or a device for each rank), the last
// block of a kernel waits, for flags in memory of the device. Elsewhere contexts take turns on the device, and a kernel
// that waits would hold up the others for milliseconds: there the stream waits, for flags in memory of the host. Either
// way an abort is a word in memory of the host, which needs no queue to the device: those may all be blocked by streams
// that wait. It is read across PCIe, so by one block at most, and only by waits that last.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace maniple::cuda_plugin {

inline constexpr int kMostRanks = 64;

/// Of every rank: at the start of its arena where kernels wait, in memory of the host where streams do. Those of a peer
/// are written by that peer alone.
struct Flags {
  std::uint8_t ready[kMostRanks];
  std::uint8_t done[kMostRanks];
  std::uint64_t lead_ready[kMostRanks];  // of the leader: words, written by the others
  std::uint64_t lead_done;               // of the others
};

/// Of every rank, in its arena: what every block of a kernel looks at.
struct DeviceState {
  std::uint64_t words[kMostRanks];  // from the peers; cleared when they are used up, so that none counts twice
  std::uint32_t stopped;            // a kernel of this rank has seen `stop`: the following do nothing
  std::uint32_t blocks;             // of the running kernel that have finished
};
inline constexpr std::size_t kFlagsBytes = 4096;
inline constexpr std::size_t kStateOffset = 2048;  // in the arena
static_assert(sizeof(Flags) <= kStateOffset && kStateOffset + sizeof(DeviceState) <= kFlagsBytes);

/// What a rank says to another: bit 0 is set, then 40 bits of offset of what the other is to read, then 23 bits of the
/// hash of the call.
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

/// In memory of the host, one for each rank.
struct HostRecord {
  std::uint64_t seq;       // what its kernels found: of the call that differs
  std::uint32_t mismatch;  // written after it
  std::uint32_t stop;      // the group was aborted (a StopReason): do nothing, and leave the flags as they are
  std::uint8_t awaited[kMostRanks];  // peers that a kernel has waited for a while
};
enum StopReason : std::uint32_t { kRunning = 0, kAborted = 1, kAbortedByAnother = 2 };

struct Piece {
  const std::byte* from;
  std::byte* to;
  std::size_t bytes;
};

// Kernels are told little: every 100 bytes of arguments make a launch slower. So what belongs to ranks lies at equal
// distances.

/// How ranks synchronise around a kernel.
struct Signal {
  std::byte* flags;         ///< of rank 0, as this process sees them; those of the others follow
  std::size_t flags_apart;  ///< bytes from those of one rank to those of the next
  std::byte* states;        ///< DeviceState, in the same way
  std::size_t states_apart;
  HostRecord* record;    ///< of this rank
  std::uint64_t active;  ///< peers that take part in this round, a bit for each; never this rank itself
  int rank;
  int ranks;
  bool in_kernel;   ///< kernels wait, not streams
  bool one_device;  ///< flags and data are all in memory of one device
};

struct EnterArguments {
  Signal signal;
  std::uint64_t words[kMostRanks];  ///< for each peer
  Piece pieces[kMostRanks];         ///< to stage; in `from` and `to`
  int piece_count;
};

/// A source is the memory of its rank (`base`, and those of the others at equal distances) plus the offset in that
/// rank's word; of this rank it is `own`.
struct WorkArguments {
  Signal signal;
  const std::byte* base;
  std::size_t apart;
  const std::byte* own;  ///< null: it has none
  std::uint64_t seq;
  bool lead;   ///< the first rank for all: the kernel clears lead_ready and sets lead_done
  bool waits;  ///< lead: each block waits for the peers by itself; only where blocks are few
};

/// What comes from rank i goes to `to[i]`.
struct CopyArguments : WorkArguments {
  std::uint32_t expected[kMostRanks];  ///< hash_in() of the words of the peers
  std::byte* to[kMostRanks];
  std::size_t bytes[kMostRanks];
};

/// From all ranks, in rank order, to out; or, if in_place, to the sources themselves.
struct ReduceArguments : WorkArguments {
  std::uint32_t expected;  ///< hash_in() of the word of every peer
  std::byte* out;
  std::size_t first;  ///< in_place: the elements [first, first + count)
  std::size_t count;  ///< elements; 0: nothing to reduce
  double factor;
  int divide_by;
  bool in_place;
  bool premultiply;
  bool enters;              ///< one block, where kernels wait: it does what `enter` does as well
  std::uint64_t word;       ///< `enters`: for rank 0
  std::uint64_t word_step;  ///< and from the word for one rank to that for the next
  Piece piece;
};

/// What a rank that does not lead says to the one that does.
struct FollowArguments {
  Signal signal;
  std::uint64_t word;
};

/// Before the first launch on a device.
void load_kernels();
bool is_one_block(std::size_t bytes);  ///< a reduction of so much is done by
/// So much work is done by so few blocks that all of them may wait for other ranks.
bool may_wait(std::size_t bytes);
void launch_follow(const FollowArguments& arguments, cudaStream_t stream);
/// Waits until all peers have said their word to the leader.
void launch_await(const Signal& signal, cudaStream_t stream);
void launch_enter(const EnterArguments& arguments, cudaStream_t stream);
void launch_copy(const CopyArguments& arguments, cudaStream_t stream);
/// With the numbers of DType and ReduceOp::Kind: types.h is C++20, which nvcc of CUDA 11 does not know.
void launch_reduce(const ReduceArguments& arguments, int dtype, int kind, cudaStream_t stream);

}  // namespace maniple::cuda_plugin
