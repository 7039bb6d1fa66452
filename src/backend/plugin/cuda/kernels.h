// The kernels: what they are told, and the flags by which ranks order each other.
//
// An operation of a group is, on every rank and in the order of its stream:
//
//   enter    a kernel: copies what others are to read into the own slot (ordinary memory), clears the own `done` bytes, writes to
//            every peer the word that says what is called and where its data is, and then the peer's `ready` byte
//   wait     until all own `ready` bytes are set. Done by the stream, not by a kernel, so that nothing spins
//   work     a kernel: compares the words; reads from the peers, writes `out`; clears the own `ready` bytes; sets the peers' `done`
//   wait     until all own `done` bytes are set: nobody reads or writes this rank's memory any more
//
// All values are constants, so that a graph can replay it. That is safe: a peer sets its next `ready` here only after its wait for
// `done`, for which it needs mine, which I set after I cleared `ready`: so none is lost, and none is seen twice. And it sets its next
// `done` here only after it has seen my next `ready`, which I set after I cleared `done`.
//
// Where one rank can reach all memory there is and all are on one device, one of them does all the work (`lead`): the others need no
// kernel at all. They write their word to the leader and wait for `lead_done`. Without MPS, contexts take turns on the device, and a
// kernel on each of two ranks costs 290 us instead of 13.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace maniple::cuda_plugin {

inline constexpr int kMostRanks = 64;

/// Of every rank: at the start of its arena, or in memory of the host (see queue_count). Bytes and words of a peer are written by that
/// peer alone.
struct Flags {
  std::uint8_t ready[kMostRanks];
  std::uint8_t done[kMostRanks];
  std::uint64_t words[kMostRanks];
  std::uint64_t lead_ready[kMostRanks];  // of the leader: words, written by the streams of the others
  std::uint64_t lead_done;               // of the others
  std::uint32_t stop;                    // the group was aborted: do nothing, and leave the flags set
  std::uint32_t unused;
};
inline constexpr std::size_t kFlagsBytes = 4096;
inline constexpr std::size_t kBlocksOffset = 3072;  // in the arena: how many blocks of the running kernel have finished
static_assert(sizeof(Flags) <= kBlocksOffset);

/// What a rank says to another: bit 0 is set, then 40 bits of offset of what the other is to read, then 23 bits of the hash of the call.
constexpr std::uint64_t make_word(std::uint64_t hash, std::uint64_t offset) noexcept {
  return (hash >> 41) << 41 | (offset & ((std::uint64_t{1} << 40) - 1)) << 1 | 1;
}

/// In memory of the host, one for each rank: what its kernels found.
struct FaultRecord {
  std::uint64_t seq;
  std::uint32_t mismatch;
  std::uint32_t peer;
};

struct Piece {
  const std::byte* from;
  std::byte* to;
  std::size_t bytes;
};

/// How ranks synchronise around a kernel.
struct Signal {
  Flags* flags[kMostRanks];  ///< of all ranks, as this process sees them
  unsigned* blocks;          ///< of the running kernel that have finished
  std::uint64_t active;      ///< peers that take part in this round, a bit for each; never this rank itself
  int rank;
  int ranks;
};

struct EnterArguments {
  Signal signal;
  std::uint64_t words[kMostRanks];  ///< for each peer
  Piece pieces[kMostRanks];         ///< to stage; in `from` and `to`
  int piece_count;
};

/// A source is `base` plus the offset in the word of its rank, or `own` where that is not null.
struct WorkArguments {
  Signal signal;
  std::uint64_t expected[kMostRanks];  ///< words of the peers; their offsets do not count
  const std::byte* bases[kMostRanks];
  const std::byte* own;  ///< source of this rank itself; null: it has none
  FaultRecord* fault;
  std::uint64_t seq;
  bool lead;  ///< the words are in lead_ready, and lead_done is to be set

  // Copies: what comes from rank i goes to `to[i]`.
  std::byte* to[kMostRanks];
  std::size_t bytes[kMostRanks];

  // Reductions: from all ranks, in rank order, to out; or, if in_place, to the sources themselves.
  std::byte* out;
  std::size_t first;  ///< in_place: the elements [first, first + count)
  std::size_t count;  ///< elements; 0: nothing to reduce
  double factor;
  int divide_by;
  bool in_place;
  bool premultiply;
};

/// Before the first launch on a device.
void load_kernels();
void launch_enter(const EnterArguments& arguments, cudaStream_t stream);
void launch_copy(const WorkArguments& arguments, cudaStream_t stream);
/// With the numbers of DType and ReduceOp::Kind: types.h is C++20, which nvcc of CUDA 11 does not know.
void launch_reduce(const WorkArguments& arguments, int dtype, int kind, cudaStream_t stream);

}  // namespace maniple::cuda_plugin
