#include "plugins/cuda/kernels.h"

#include <algorithm>
#include <type_traits>

#include "plugins/cuda/driver.h"

namespace maniple::cuda_plugin {
namespace {

constexpr int kThreads = 512;
constexpr std::size_t kBytesOfBlock = 16 * kThreads;  // that a block is launched for, unless there are too many
constexpr unsigned kWaitingBlocks = 16;               // few, so that what the peers do first finds room on the device
constexpr unsigned kPatience = 64;                    // looks at a flag, about 40 us, before a look across PCIe

// As in types.h; run.cpp sees to it that they are the same.
enum Dtype { kInt8, kInt16, kInt32, kInt64, kUint8, kFloat16, kBfloat16, kFloat32, kFloat64, kBool8 };
constexpr std::size_t kSizes[] = {1, 2, 4, 8, 1, 2, 2, 4, 8, 1};
enum Kind { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor, kPremulSum };

template <class T>
__device__ T poll(const T* at) {
  return *static_cast<const volatile T*>(at);
}
template <class T>
__device__ void put(T* at, T value) {
  *static_cast<volatile T*>(at) = value;
}

__device__ Flags* flags_of(const Signal& signal, int rank) {
  return reinterpret_cast<Flags*>(signal.flags + rank * signal.flags_apart);
}
__device__ DeviceState* state_of(const Signal& signal, int rank) {
  return reinterpret_cast<DeviceState*>(signal.states + rank * signal.states_apart);
}

__device__ bool is_active(const Signal& signal, int rank) {
  return rank < signal.ranks && (signal.active >> rank & 1) != 0;
}

/// What was written before is seen by other ranks before what is written after; and likewise for what is read.
__device__ void fence(const Signal& signal) {
  if (signal.one_device) {
    __threadfence();
  } else {
    __threadfence_system();
  }
}

/// Whether the group was aborted: as far as kernels of this rank have seen, or, where streams wait, in host
/// memory.
__device__ bool is_stopped(const Signal& signal) {
  return poll(signal.in_kernel ? &state_of(signal, signal.rank)->stopped : &signal.record->stop) != 0;
}

/// Waits for a flag that a peer sets, and returns it; 0: the group was aborted.
template <class T>
__device__ T await(const T* flag, const Signal& signal, int peer) {
  unsigned turn = 0;
  T seen = poll(flag);
  for (; seen == 0; seen = poll(flag), ++turn) {
    if (turn % kPatience != kPatience - 1) continue;
    if (turn == kPatience - 1) put(&signal.record->awaited[peer], std::uint8_t{1});
    if (poll(&signal.record->stop) == 0) continue;
    put(&state_of(signal, signal.rank)->stopped, 1u);
    return 0;
  }
  if (turn >= kPatience) put(&signal.record->awaited[peer], std::uint8_t{0});
  fence(signal);
  return seen;
}

/// True in the one block that is the last to get here; it sees what the others wrote, and so does whoever it tells.
__device__ bool is_last_block(const Signal& signal) {
  unsigned* const finished = &state_of(signal, signal.rank)->blocks;
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned blocks = gridDim.x * gridDim.y;
    last = true;
    if (blocks > 1) {
      fence(signal);
      last = atomicAdd(finished, 1u) == blocks - 1;
      if (last) put(finished, 0u);
    }
  }
  __syncthreads();
  return last;
}

template <class Unit>
__device__ void copy_units(std::byte* to, const std::byte* from, std::size_t bytes, std::size_t at, std::size_t step) {
  auto* const target = reinterpret_cast<Unit*>(to);
  const auto* const source = reinterpret_cast<const Unit*>(from);
  const std::size_t units = bytes / sizeof(Unit);
  // Four loads in flight before the first store.
  for (; at + 3 * step < units; at += 4 * step) {
    const Unit a = source[at], b = source[at + step], c = source[at + 2 * step], d = source[at + 3 * step];
    target[at] = a;
    target[at + step] = b;
    target[at + 2 * step] = c;
    target[at + 3 * step] = d;
  }
  for (; at < units; at += step) target[at] = source[at];
}

/// By the threads of the blocks of one row of the grid. Any alignment; fastest where both addresses have the same,
/// modulo 16.
__device__ void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (to == from) return;
  const std::size_t thread = blockIdx.x * std::size_t{kThreads} + threadIdx.x;
  const std::size_t threads = gridDim.x * std::size_t{kThreads};
  const auto target = reinterpret_cast<std::uintptr_t>(to);
  const auto apart = target ^ reinterpret_cast<std::uintptr_t>(from);
  const std::size_t unit = (apart & 15) == 0 ? 16 : (apart & 3) == 0 ? 4 : 1;
  const std::size_t head = min(bytes, static_cast<std::size_t>((unit - target % unit) % unit));
  const std::size_t body = (bytes - head) / unit * unit;
  if (thread < head) to[thread] = from[thread];
  if (unit == 16) {
    copy_units<uint4>(to + head, from + head, body, thread, threads);
  } else if (unit == 4) {
    copy_units<std::uint32_t>(to + head, from + head, body, thread, threads);
  } else {
    copy_units<std::uint8_t>(to + head, from + head, body, thread, threads);
  }
  const std::size_t tail = bytes - head - body;
  if (thread < tail) to[head + body + thread] = from[head + body + thread];
}

__device__ std::uint64_t word_for(const EnterArguments& a, int peer) { return a.words[peer]; }
__device__ std::uint64_t word_for(const ReduceArguments& a, int peer) { return a.word + peer * a.word_step; }
__device__ std::uint32_t hash_from(const CopyArguments& a, int peer) { return a.expected[peer]; }
__device__ std::uint32_t hash_from(const ReduceArguments& a, int) { return a.expected; }

/// By one block, after what its rank stages: tells the peers, and waits for them.
template <class Arguments>
__device__ void announce(const Arguments& a) {
  const Signal& signal = a.signal;
  Flags* const own = flags_of(signal, signal.rank);
  if (threadIdx.x < kMostRanks / 8) put(reinterpret_cast<std::uint64_t*>(own->done) + threadIdx.x, std::uint64_t{0});
  __syncthreads();
  const int peer = static_cast<int>(threadIdx.x);
  if (!is_active(signal, peer)) return;
  put(&state_of(signal, peer)->words[signal.rank], word_for(a, peer));
  fence(signal);
  put(&flags_of(signal, peer)->ready[signal.rank], std::uint8_t{1});
  if (signal.in_kernel) await(&own->ready[peer], signal, peer);
}

/// For all threads of a block.
__device__ bool is_stopped_for_all(const Signal& signal) {
  __shared__ bool stopped;
  if (threadIdx.x == 0) stopped = is_stopped(signal);
  __syncthreads();
  return stopped;
}

__global__ void __launch_bounds__(kThreads) enter(const __grid_constant__ EnterArguments a) {
  const bool stopped = is_stopped_for_all(a.signal);
  if (!stopped && static_cast<int>(blockIdx.y) < a.piece_count) {
    const Piece& piece = a.pieces[blockIdx.y];
    copy_bytes(piece.to, piece.from, piece.bytes);
  }
  if (is_last_block(a.signal) && !stopped) announce(a);
}

/// The same at the start of a kernel of one block.
__device__ void enter_here(const ReduceArguments& a) {
  if (is_stopped_for_all(a.signal)) return;
  copy_bytes(a.piece.to, a.piece.from, a.piece.bytes);
  __syncthreads();
  announce(a);
  __syncthreads();
}

/// A rank that does not lead, where kernels wait.
__global__ void follow(const __grid_constant__ FollowArguments a) {
  const Signal& signal = a.signal;
  Flags* const own = flags_of(signal, signal.rank);
  const bool stopped = is_stopped(signal);
  fence(signal);  // before the test, as both take a while
  if (stopped) return;
  put(&flags_of(signal, 0)->lead_ready[signal.rank], a.word);
  await(&own->lead_done, signal, 0);
  put(&own->lead_done, std::uint64_t{0});
}

__global__ void await_all(const __grid_constant__ Signal signal) {
  const int peer = static_cast<int>(threadIdx.x);
  if (is_active(signal, peer) && !is_stopped(signal)) {
    await(&flags_of(signal, signal.rank)->lead_ready[peer], signal, peer);
  }
}

/// What a block found before the work.
enum Found { kAll, kMismatch, kStopped };

/// Where the data of each rank is, if all have called the same. For all threads of a block.
template <class Arguments>
__device__ Found find_sources(const Arguments& a, const std::byte* (&sources)[kMostRanks]) {
  const Signal& signal = a.signal;
  const int peer = static_cast<int>(threadIdx.x);
  Found found = kAll;
  if (peer == signal.rank) sources[peer] = a.own;
  if (is_active(signal, peer)) {
    Flags* const own = flags_of(signal, signal.rank);
    DeviceState* const state = state_of(signal, signal.rank);
    const std::uint64_t* const place = a.lead && signal.in_kernel ? &own->lead_ready[peer] : &state->words[peer];
    // Both at once: each of them takes a while to come.
    std::uint64_t word = poll(place);
    const std::uint32_t stopped = poll(&state->stopped);
    if (a.waits && stopped == 0) {
      if (word == 0) {
        word = await(place, signal, peer);
      } else {
        fence(signal);
      }
    }
    if (stopped != 0 || (a.waits && word == 0)) {
      found = kStopped;
    } else if (hash_in(word) != hash_from(a, peer) || (word & 1) == 0) {
      if (blockIdx.x == 0 && blockIdx.y == 0 && poll(&signal.record->stop) == 0) {
        put(&signal.record->seq, a.seq);
        __threadfence_system();
        put(&signal.record->mismatch, 1u);
      }
      found = kMismatch;
    }
    sources[peer] = a.base + peer * a.apart + offset_in(word);
  }
  if (__syncthreads_and(found == kAll) != 0) return kAll;
  return __syncthreads_or(found == kStopped) != 0 ? kStopped : kMismatch;
}

/// After the work: the own flags are made ready for the next operation before any peer can begin it.
__device__ void leave(const WorkArguments& a, Found found) {
  const Signal& signal = a.signal;
  if (signal.active == 0 || !is_last_block(signal)) return;
  const int peer = static_cast<int>(threadIdx.x);
  if (!is_active(signal, peer)) return;
  // Where kernels wait and this is the only block, `found` holds everything that was seen.
  const bool known = signal.in_kernel && gridDim.x * gridDim.y == 1;
  if (found == kStopped || (!known && is_stopped(signal))) return;
  Flags* const own = flags_of(signal, signal.rank);
  Flags* const theirs = flags_of(signal, peer);
  put(&state_of(signal, signal.rank)->words[peer], std::uint64_t{0});
  if (a.lead) {
    put(&own->lead_ready[peer], std::uint64_t{0});
    fence(signal);
    put(&theirs->lead_done, std::uint64_t{1});
  } else {
    put(&own->ready[peer], std::uint8_t{0});
    fence(signal);
    put(&theirs->done[signal.rank], std::uint8_t{1});
    if (signal.in_kernel) await(&own->done[peer], signal, peer);
  }
}

__global__ void __launch_bounds__(kThreads) copy(const __grid_constant__ CopyArguments a) {
  __shared__ const std::byte* sources[kMostRanks];
  const Found found = find_sources(a, sources);
  if (found == kAll) {
    const int from = static_cast<int>(blockIdx.y);
    if (a.bytes[from] != 0) copy_bytes(a.to[from], sources[from], a.bytes[from]);
  }
  leave(a, found);
}

#include "plugins/cuda/arithmetic.cuh"

template <class Format, class Combine>
__global__ void __launch_bounds__(kThreads) reduce(const __grid_constant__ ReduceArguments a) {
  __shared__ const std::byte* sources[kMostRanks];
  if (a.enters) enter_here(a);
  const Found found = find_sources(a, sources);
  if (found == kAll && a.count != 0) {
    constexpr std::size_t kElement = sizeof(typename Format::Stored);
    const Change<Format> change(a);
    // Elements are read and written by the same thread, so a target may be the memory of a source.
    std::uintptr_t bits = reinterpret_cast<std::uintptr_t>(a.out);
    for (int rank = 0; rank < a.signal.ranks; ++rank) bits |= reinterpret_cast<std::uintptr_t>(sources[rank]);
    bits |= a.first * kElement;
    std::size_t done = 0;
    if (bits % 16 == 0) {
      reduce_vectors<Format, Combine>(a, sources, change);
      done = a.count / (16 / kElement) * (16 / kElement);
    }
    if (bits % kElement == 0) {
      reduce_elements<Format, Combine, Aligned<Format>>(a, sources, change, done);
    } else {
      reduce_elements<Format, Combine, Unaligned<Format>>(a, sources, change, done);
    }
  }
  leave(a, found);
}

/// Number of blocks for `bytes` in one row of the grid: enough to fill the device, a few for each multiprocessor.
unsigned blocks_for(std::size_t bytes, int rows) {
  static const int max_blocks = [] {
    int device = 0;
    int processors = 0;
    check(::cudaGetDevice(&device), "cudaGetDevice");
    check(::cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    // More than fit at a time: where a kernel that waits has taken some room, the rest is shared out evenly.
    return 8 * processors;
  }();
  const std::size_t needed = (bytes + kBytesOfBlock - 1) / kBytesOfBlock;
  return static_cast<unsigned>(std::clamp<std::size_t>(needed, 1, std::max(1, max_blocks / std::max(1, rows))));
}

template <class Kernel, class Arguments>
void launch(Kernel kernel, const Arguments& arguments, dim3 grid, cudaStream_t stream, int threads = kThreads) {
  kernel<<<grid, threads, 0, stream>>>(arguments);
  check(::cudaGetLastError(), "cudaLaunchKernel");
}

template <class Format>
void launch_number(const ReduceArguments& a, int kind, dim3 grid, cudaStream_t stream) {
  switch (kind) {
    case kProduct: return launch(reduce<Format, Multiply>, a, grid, stream);
    case kMin: return launch(reduce<Format, Least>, a, grid, stream);
    case kMax: return launch(reduce<Format, Greatest>, a, grid, stream);
    default: return launch(reduce<Format, Add>, a, grid, stream);
  }
}

template <class Format>
void launch_bits(const ReduceArguments& a, int kind, dim3 grid, cudaStream_t stream) {
  switch (kind) {
    case kBand:
    case kProduct:
    case kMin: return launch(reduce<Format, And>, a, grid, stream);
    case kBxor: return launch(reduce<Format, Xor>, a, grid, stream);
    default: return launch(reduce<Format, Or>, a, grid, stream);
  }
}

}  // namespace

void load_kernels() {
  // A kernel that is loaded when it is first launched may wait for streams, and those for other ranks. The first look
  // loads it.
  cudaFuncAttributes attributes;
  const auto load = [&attributes](auto... kernels) {
    (check(::cudaFuncGetAttributes(&attributes, kernels), "cudaFuncGetAttributes"), ...);
  };
  const auto load_number = [&load](auto format) {
    using Format = decltype(format);
    load(reduce<Format, Add>, reduce<Format, Multiply>, reduce<Format, Least>, reduce<Format, Greatest>);
  };
  const auto load_bits = [&load](auto format) {
    using Format = decltype(format);
    load(reduce<Format, And>, reduce<Format, Or>, reduce<Format, Xor>);
  };
  load(enter, copy, follow, await_all);
  load_number(Number<std::int8_t>());
  load_number(Number<std::int16_t>());
  load_number(Number<std::int32_t>());
  load_number(Number<std::int64_t>());
  load_number(Number<std::uint8_t>());
  load_number(Float16());
  load_number(Bfloat16());
  load_number(Number<float>());
  load_number(Number<double>());
  load_bits(Number<std::uint8_t>());
  load_bits(Truth());
}

bool is_one_block(std::size_t bytes) { return bytes <= kBytesOfBlock; }

bool may_wait(std::size_t bytes) { return bytes <= kWaitingBlocks * kBytesOfBlock; }

void launch_follow(const FollowArguments& a, cudaStream_t stream) { launch(follow, a, dim3(1), stream, 1); }

void launch_await(const Signal& signal, cudaStream_t stream) { launch(await_all, signal, dim3(1), stream, kMostRanks); }

void launch_enter(const EnterArguments& a, cudaStream_t stream) {
  std::size_t largest = 0;
  for (int i = 0; i < a.piece_count; ++i) largest = std::max(largest, a.pieces[i].bytes);
  const auto rows = static_cast<unsigned>(std::max(1, a.piece_count));
  launch(enter, a, dim3(blocks_for(largest, a.piece_count), rows), stream);
}

void launch_copy(const CopyArguments& a, cudaStream_t stream) {
  std::size_t largest = 0;
  for (int i = 0; i < a.signal.ranks; ++i) largest = std::max(largest, a.bytes[i]);
  const auto rows = static_cast<unsigned>(largest == 0 ? 1 : a.signal.ranks);
  launch(copy, a, dim3(blocks_for(largest, a.signal.ranks), rows), stream);
}

void launch_reduce(const ReduceArguments& a, int dtype, int kind, cudaStream_t stream) {
  const std::size_t bytes = a.count * kSizes[dtype];
  const dim3 grid(blocks_for(bytes, 1));
  if (dtype == kBool8) return launch_bits<Truth>(a, kind, grid, stream);
  if (kind == kBand || kind == kBor || kind == kBxor) {
    ReduceArguments in_bytes = a;
    in_bytes.count = bytes;
    in_bytes.first *= kSizes[dtype];
    return launch_bits<Number<std::uint8_t>>(in_bytes, kind, grid, stream);
  }
  switch (dtype) {
    case kInt8: return launch_number<Number<std::int8_t>>(a, kind, grid, stream);
    case kInt16: return launch_number<Number<std::int16_t>>(a, kind, grid, stream);
    case kInt32: return launch_number<Number<std::int32_t>>(a, kind, grid, stream);
    case kInt64: return launch_number<Number<std::int64_t>>(a, kind, grid, stream);
    case kUint8: return launch_number<Number<std::uint8_t>>(a, kind, grid, stream);
    case kFloat16: return launch_number<Float16>(a, kind, grid, stream);
    case kBfloat16: return launch_number<Bfloat16>(a, kind, grid, stream);
    case kFloat32: return launch_number<Number<float>>(a, kind, grid, stream);
    default: return launch_number<Number<double>>(a, kind, grid, stream);
  }
}

}  // namespace maniple::cuda_plugin
