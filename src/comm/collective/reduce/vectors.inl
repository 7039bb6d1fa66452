// Vectors and element formats for kernels.inl. The including file defines kVectorBytes.
//
// This uses the compiler's vector extension, as destinations that alias sources and unaligned pointers prevent
// auto-vectorisation but not explicit loads and stores. A *format* defines how elements are stored and in which type
// they are computed:
//   Value         type of the arithmetic         Lanes   vector of kLanes of them
//   Vector        the unit of a load, kVectorStep bytes in memory: Lanes or a Pair of them
//   kVectors      vectors in a block: the number that fits the registers, with room for operands
//   kVectorsOfTwo the same for two sources; fewer are faster, as loads and stores mix more evenly
// `one` forms handle single elements at the end.
//
// This file is compiled for instruction sets beyond the baseline. It must not use inline functions that other files
// also use (std::min, std::span, ...), or the linker may pick this copy for the whole program.

template <class T, int kLanes>
struct VectorType {
  typedef T type __attribute__((vector_size(kLanes * sizeof(T))));
};
template <class T, int kLanes>
using VectorOf = typename VectorType<T, kLanes>::type;

/// T at any address, in memory of any type. (memcpy would work, but GCC moves 16 bytes through integer registers.)
template <class T>
struct __attribute__((packed, may_alias)) Anywhere {
  T value;
};

template <class T>
[[gnu::always_inline]] inline T load_bytes(const std::byte* from) {
  return reinterpret_cast<const Anywhere<T>*>(from)->value;
}

template <class T>
[[gnu::always_inline]] inline void store_bytes(std::byte* to, const T& value) {
  reinterpret_cast<Anywhere<T>*>(to)->value = value;
}

template <class Lanes>
struct Pair {
  Lanes even;
  Lanes odd;
};

/// Computed as stored. Unsigned types also stand for signed integers where wrapping makes them equal.
template <class T>
struct Direct {
  using Value = T;
  static constexpr int kLanes = kVectorBytes / sizeof(T);
  static constexpr int kVectors = 8;
  static constexpr int kVectorsOfTwo = 4;
  static constexpr std::size_t kElementBytes = sizeof(T);
  static constexpr std::size_t kVectorStep = kVectorBytes;
  using Lanes = VectorOf<T, kLanes>;
  using Vector = Lanes;
  static Vector load(const std::byte* from) { return load_bytes<Vector>(from); }
  static void store(std::byte* to, const Vector& value) { store_bytes(to, value); }
  static Value load_one(const std::byte* from) { return load_bytes<T>(from); }
  static void store_one(std::byte* to, Value value) { store_bytes(to, value); }
};

/// One byte; any non-zero value reads as 1.
struct Truth : Direct<std::uint8_t> {
  static Vector load(const std::byte* from) {
    return reinterpret_cast<Vector>(load_bytes<Vector>(from) != Vector{}) & static_cast<std::uint8_t>(1);
  }
  static Value load_one(const std::byte* from) { return load_bytes<std::uint8_t>(from) != 0 ? 1 : 0; }
};

/// Pairs of bfloat16 as 32-bit words, which needs no shuffle: elements at odd places are float32 once the low half is
/// cleared, elements at even places after a shift.
struct Bfloat16 {
  using Value = float;
  static constexpr int kLanes = kVectorBytes / sizeof(float);
  static constexpr int kVectors = 4;
  static constexpr int kVectorsOfTwo = 4;
  static constexpr std::size_t kElementBytes = 2;
  static constexpr std::size_t kVectorStep = kVectorBytes;
  using Lanes = VectorOf<float, kLanes>;
  using Vector = Pair<Lanes>;
  using Words = VectorOf<std::uint32_t, kLanes>;
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
  static Vector load(const std::byte* from) {
    const Words words = load_bytes<Words>(from);
    return {reinterpret_cast<Lanes>(words << 16u), reinterpret_cast<Lanes>(words & 0xffff0000u)};
  }
  static void store(std::byte* to, const Vector& value) {
    store_bytes(to, (rounded(value.even) >> 16u) | (rounded(value.odd) & 0xffff0000u));
  }
  static Value load_one(const std::byte* from) { return half::float_from_bfloat16(load_bytes<std::uint16_t>(from)); }
  static void store_one(std::byte* to, Value value) { store_bytes(to, half::bfloat16_from_float(value)); }

 private:
  /// Rounds to the upper half. NaN needs no special case: its low half is clear, as it came from a bfloat16, from the
  /// processor or from a factor whose payload was dropped, so rounding does not carry.
  static Words rounded(const Lanes& value) {
    const Words bits = reinterpret_cast<Words>(value);
    const Words odd = reinterpret_cast<Words>((bits & 0x10000u) != 0u);  // all ones (-1) if odd
    return bits + 0x7fffu - odd;
  }
};

struct Float16 {
  using Value = float;
  static constexpr int kLanes = kVectorBytes / sizeof(float);
  static constexpr int kVectors = 8;
  static constexpr int kVectorsOfTwo = 8;
  static constexpr std::size_t kElementBytes = 2;
  static constexpr std::size_t kVectorStep = kVectorBytes / 2;
  using Lanes = VectorOf<float, kLanes>;
  using Vector = Lanes;
#if defined(__aarch64__)
  static_assert(kVectorBytes == 16);
  static Vector load(const std::byte* from) {
    return reinterpret_cast<Vector>(vcvt_f32_f16(load_bytes<float16x4_t>(from)));
  }
  static void store(std::byte* to, const Vector& value) {
    store_bytes(to, vcvt_f16_f32(reinterpret_cast<float32x4_t>(value)));
  }
#elif defined(__AVX512F__)
  static_assert(kVectorBytes == 64);
  static constexpr __mmask16 kAll = 0xffff;  // GCC 12 warns in its own header about the forms without a mask
  static Vector load(const std::byte* from) { return _mm512_maskz_cvtph_ps(kAll, load_bytes<__m256i>(from)); }
  static void store(std::byte* to, const Vector& value) {
    store_bytes(to, _mm512_maskz_cvtps_ph(kAll, value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#elif defined(__F16C__)
  static_assert(kVectorBytes == 32);
  static Vector load(const std::byte* from) { return _mm256_cvtph_ps(load_bytes<__m128i>(from)); }
  static void store(std::byte* to, const Vector& value) {
    store_bytes(to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
#else
  [[gnu::noinline]] static Vector load(const std::byte* from) {
    Vector value;
    for (int lane = 0; lane < kLanes; ++lane) value[lane] = load_one(from + lane * kElementBytes);
    return value;
  }
  [[gnu::noinline]] static void store(std::byte* to, const Vector& value) {
    for (int lane = 0; lane < kLanes; ++lane) store_one(to + lane * kElementBytes, value[lane]);
  }
#endif
  static Value load_one(const std::byte* from) { return half::float_from_float16(load_bytes<std::uint16_t>(from)); }
  static void store_one(std::byte* to, Value value) { store_bytes(to, half::float16_from_float(value)); }
};
