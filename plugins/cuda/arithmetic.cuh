// The arithmetic of reductions on the device, included by kernels.cu: the meaning of types.h and the bits of src/comm/collective/reduce.
//
// Operands are taken in the order of ranks. float16 and bfloat16 become float32 when they are read and are rounded when the result is
// written. Compiled without contraction to fused multiply-add (-fmad=false).

// ---- How elements are held in memory (Stored) and in registers (Value).

template <class T>
struct Number {
  using Stored = T;
  using Value = T;
  static __device__ Value load(Stored stored) { return stored; }
  static __device__ Stored store(Value value) { return value; }
};

struct Truth {
  using Stored = std::uint8_t;
  using Value = std::uint8_t;
  static __device__ Value load(Stored stored) { return stored != 0 ? 1 : 0; }
  static __device__ Stored store(Value value) { return value; }
};

struct Float16 {
  using Stored = std::uint16_t;
  using Value = float;
  static __device__ Value load(Stored stored) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(stored));
    return value;
  }
  static __device__ Stored store(Value value) {
    std::uint16_t stored;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored) : "f"(value));
    return stored;
  }
};

struct Bfloat16 {
  using Stored = std::uint16_t;
  using Value = float;
  static __device__ Value load(Stored stored) { return __uint_as_float(static_cast<std::uint32_t>(stored) << 16); }
  static __device__ Stored store(Value value) {
    const std::uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<Stored>((bits >> 16) | 0x40u);
    return static_cast<Stored>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

// ---- How two elements become one.

/// Integers wrap around, so they are calculated with unsigned, and not as the int that small ones are promoted to.
template <class T, bool kInteger = std::is_integral_v<T>>
struct Wide {
  using Type = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
};
template <class T>
struct Wide<T, false> {
  using Type = T;
};
template <class T>
using WideType = typename Wide<T>::Type;

struct Add {
  template <class T>
  static __device__ T apply(T a, T b) {
    return static_cast<T>(static_cast<WideType<T>>(a) + static_cast<WideType<T>>(b));
  }
};
struct Multiply {
  template <class T>
  static __device__ T apply(T a, T b) {
    return static_cast<T>(static_cast<WideType<T>>(a) * static_cast<WideType<T>>(b));
  }
};
struct Least {
  template <class T>
  static __device__ T apply(T a, T b) {
    return (a < b) | (a != a) ? a : b;
  }
};
struct Greatest {
  template <class T>
  static __device__ T apply(T a, T b) {
    return (a > b) | (a != a) ? a : b;
  }
};
struct And {
  template <class T>
  static __device__ T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <class T>
  static __device__ T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <class T>
  static __device__ T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

/// What is done to elements after they are read and before they are written: premul_sum and avg.
template <class Format>
struct Change {
  using Value = typename Format::Value;
  explicit __device__ Change(const ReduceArguments& a) : by(a.divide_by), premultiply(a.premultiply) {
    if constexpr (std::is_integral_v<Value>) {
      factor = static_cast<Value>(static_cast<std::int64_t>(a.factor));  // wraps, as the product does
    } else {
      factor = static_cast<Value>(a.factor);
    }
  }
  __device__ Value read(typename Format::Stored stored) const {
    const Value value = Format::load(stored);
    return premultiply ? Multiply::apply(value, factor) : value;
  }
  __device__ typename Format::Stored written(Value value) const {
    if (by == 1) return Format::store(value);
    if constexpr (std::is_integral_v<Value>) {
      return Format::store(static_cast<Value>(value / by));
    } else {
      return Format::store(value / static_cast<Value>(by));
    }
  }
  Value factor;
  int by;
  bool premultiply;
};

// ---- The loops.

template <class Format>
struct Aligned {
  using Stored = typename Format::Stored;
  static __device__ Stored load(const std::byte* from) { return *reinterpret_cast<const Stored*>(from); }
  static __device__ void store(std::byte* to, Stored value) { *reinterpret_cast<Stored*>(to) = value; }
};
template <class Format>
struct Unaligned {
  using Stored = typename Format::Stored;
  static __device__ Stored load(const std::byte* from) {
    union {
      Stored value;
      std::byte bytes[sizeof(Stored)];
    } result;
    for (std::size_t i = 0; i < sizeof(Stored); ++i) result.bytes[i] = from[i];
    return result.value;
  }
  static __device__ void store(std::byte* to, Stored value) {
    union {
      Stored value;
      std::byte bytes[sizeof(Stored)];
    } source;
    source.value = value;
    for (std::size_t i = 0; i < sizeof(Stored); ++i) to[i] = source.bytes[i];
  }
};

/// 16 bytes at a time; all pointers are aligned to them.
template <class Format, class Combine>
__device__ void reduce_vectors(const ReduceArguments& a, const std::byte* const* sources,
                               const Change<Format>& change) {
  using Stored = typename Format::Stored;
  using Value = typename Format::Value;
  constexpr int kLanes = 16 / sizeof(Stored);
  union Vector {
    __device__ Vector() {}
    uint4 all;
    Stored each[kLanes];
  };
  const int ranks = a.signal.ranks;
  const std::size_t vectors = a.count / kLanes;
  const std::size_t start = a.first / kLanes;
  const std::size_t step = gridDim.x * std::size_t{kThreads};
  for (std::size_t i = blockIdx.x * std::size_t{kThreads} + threadIdx.x; i < vectors; i += step) {
    const std::size_t at = (start + i) * 16;
    Value sum[kLanes];
    Vector read;
    read.all = *reinterpret_cast<const uint4*>(sources[0] + at);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] = change.read(read.each[lane]);
#pragma unroll 3
    for (int rank = 1; rank < ranks; ++rank) {
      Vector next;
      next.all = *reinterpret_cast<const uint4*>(sources[rank] + at);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) sum[lane] = Combine::apply(sum[lane], change.read(next.each[lane]));
    }
    Vector result;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) result.each[lane] = change.written(sum[lane]);
    if (a.in_place) {
      for (int rank = 0; rank < ranks; ++rank) {
        *reinterpret_cast<uint4*>(const_cast<std::byte*>(sources[rank]) + at) = result.all;
      }
    } else {
      *reinterpret_cast<uint4*>(a.out + at) = result.all;
    }
  }
}

/// One element at a time, from the element `done` on.
template <class Format, class Combine, class Memory>
__device__ void reduce_elements(const ReduceArguments& a, const std::byte* const* sources, const Change<Format>& change,
                                std::size_t done) {
  constexpr std::size_t kElement = sizeof(typename Format::Stored);
  const std::size_t step = gridDim.x * std::size_t{kThreads};
  for (std::size_t i = done + blockIdx.x * std::size_t{kThreads} + threadIdx.x; i < a.count; i += step) {
    const std::size_t at = (a.first + i) * kElement;
    typename Format::Value sum = change.read(Memory::load(sources[0] + at));
    for (int rank = 1; rank < a.signal.ranks; ++rank) {
      sum = Combine::apply(sum, change.read(Memory::load(sources[rank] + at)));
    }
    const typename Format::Stored result = change.written(sum);
    if (a.in_place) {
      for (int rank = 0; rank < a.signal.ranks; ++rank) {
        Memory::store(const_cast<std::byte*>(sources[rank]) + at, result);
      }
    } else {
      Memory::store(a.out + at, result);
    }
  }
}
