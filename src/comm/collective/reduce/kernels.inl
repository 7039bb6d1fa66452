// The reduction loops, included by one .cpp per instruction set, which must define kVectorBytes first.
//
// A *block* is the number of elements that fit the accumulators, which stay in registers. For each block the loop reads
// and combines every source in order, then writes the result to every destination. So each byte is read once and
// written once, and a destination may be the same memory as any source, as all sources of a block are read before the
// block is written. Cost for n sources and m destinations: n loads and m stores per element, no intermediate memory.

#include "comm/collective/reduce/vectors.inl"

// ---- How two elements become one. V is a vector or, at the end of a buffer, a single element.

struct Add {
  template <class V>
  static V apply(const V& a, const V& b) {
    return static_cast<V>(a + b);
  }
};

struct Multiply {
  template <class V>
  static V apply(const V& a, const V& b) {
    if constexpr (__is_same(V, std::uint16_t)) {  // promotion to int would overflow
      return static_cast<V>(std::uint32_t{a} * b);
    } else {
      return static_cast<V>(a * b);
    }
  }
};

struct Least {
  template <class V>
  static V apply(const V& a, const V& b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

struct Greatest {
  template <class V>
  static V apply(const V& a, const V& b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

struct And {
  template <class V>
  static V apply(const V& a, const V& b) {
    return static_cast<V>(a & b);
  }
};

struct Or {
  template <class V>
  static V apply(const V& a, const V& b) {
    return static_cast<V>(a | b);
  }
};

struct Xor {
  template <class V>
  static V apply(const V& a, const V& b) {
    return static_cast<V>(a ^ b);
  }
};

// ---- What is done to an element after it is read, or before it is written.

template <class Format>
struct Keep {
  explicit Keep(const ReduceArguments&) {}
  template <class V>
  const V& operator()(const V& value) const {
    return value;
  }
};

template <class Format>
struct Scale {
  using Value = typename Format::Value;
  using Lanes = typename Format::Lanes;
  explicit Scale(Value by) : one(by) {
    for (int lane = 0; lane < Format::kLanes; ++lane) many[lane] = by;
  }
  Value operator()(Value value) const { return Multiply::apply(value, one); }
  Lanes operator()(const Lanes& value) const { return value * many; }
  Value one;
  Lanes many;
};

template <class Format>
struct Premultiply : Scale<Format> {
  using Value = typename Format::Value;
  explicit Premultiply(const ReduceArguments& a) : Scale<Format>(convert(a.factor)) {}
  static Value convert(double factor) {
    if constexpr (static_cast<Value>(0.5) == 0) {
      return static_cast<Value>(static_cast<std::int64_t>(factor));  // wraps like the product
    } else {
      return static_cast<Value>(factor != factor ? __builtin_nan("") : factor);  // see Bfloat16::rounded
    }
  }
};

/// Division by a power of two, done as a multiplication with the same bits.
template <class Format>
struct DivideByPowerOfTwo : Scale<Format> {
  using Value = typename Format::Value;
  explicit DivideByPowerOfTwo(const ReduceArguments& a) : Scale<Format>(Value{1} / static_cast<Value>(a.divide_by)) {}
};

template <class Format>
struct Divide {
  using Value = typename Format::Value;
  using Lanes = typename Format::Lanes;
  explicit Divide(const ReduceArguments& a) : one(static_cast<Value>(a.divide_by)) {
    for (int lane = 0; lane < Format::kLanes; ++lane) many[lane] = one;
  }
  Value operator()(Value value) const { return value / one; }
  Lanes operator()(const Lanes& value) const { return value / many; }
  Value one;
  Lanes many;
};

/// Divides integers, whose wrapped sum is held unsigned, as `Number`. The divisor need not fit Number.
template <class Number>
struct DivideAs {
  template <class Format>
  struct Finish {
    using Value = typename Format::Value;
    using Lanes = typename Format::Lanes;
    explicit Finish(const ReduceArguments& a) : by(a.divide_by) {}
    Value operator()(Value value) const { return static_cast<Value>(static_cast<Number>(value) / by); }
    Lanes operator()(Lanes value) const {
      for (int lane = 0; lane < Format::kLanes; ++lane) value[lane] = (*this)(static_cast<Value>(value[lane]));
      return value;
    }
    int by;
  };
};

// ---- The loop.

/// Pointers to several buffers. If their number is known at compile time (not 0) they stay in registers.
template <class Byte, int kKnown>
struct Buffers {
  template <class Pointer>
  Buffers(Pointer const* pointers, std::size_t) {
    for (int i = 0; i < kKnown; ++i) data[i] = static_cast<Byte*>(pointers[i]);
  }
  static constexpr std::size_t size() { return kKnown; }
  Byte* at(std::size_t i, std::size_t offset) const { return data[i] + offset; }
  Byte* data[kKnown];
};

template <class Byte>
struct Buffers<Byte, 0> {
  template <class Pointer>
  Buffers(Pointer const* pointers, std::size_t number) : data(pointers), count(number) {}
  std::size_t size() const { return count; }
  Byte* at(std::size_t i, std::size_t offset) const { return static_cast<Byte*>(data[i]) + offset; }
  std::conditional_t<std::is_const_v<Byte>, const void, void>* const* data;
  std::size_t count;
};

template <class Combine, class V>
[[gnu::always_inline]] inline V combine(const V& a, const V& b) {
  return Combine::apply(a, b);
}
template <class Combine, class Lanes>
[[gnu::always_inline]] inline Pair<Lanes> combine(const Pair<Lanes>& a, const Pair<Lanes>& b) {
  return {Combine::apply(a.even, b.even), Combine::apply(a.odd, b.odd)};
}

template <class Change, class V>
[[gnu::always_inline]] inline V changed(const Change& change, const V& value) {
  return change(value);
}
template <class Change, class Lanes>
[[gnu::always_inline]] inline Pair<Lanes> changed(const Change& change, const Pair<Lanes>& value) {
  return {change(value.even), change(value.odd)};
}

template <class Format, class Combine, template <class> class Prepare, template <class> class Finish, int kSources,
          int kDestinations>
void sweep(const ReduceArguments& a) {
  using Vector = typename Format::Vector;
  using Value = typename Format::Value;
  constexpr int kVectors = kSources == 2 ? Format::kVectorsOfTwo : Format::kVectors;
  constexpr std::size_t kVectorStep = Format::kVectorStep;
  constexpr std::size_t kBlockStep = kVectors * kVectorStep;
  const Buffers<const std::byte, kSources> sources(a.sources, a.source_count);
  const Buffers<std::byte, kDestinations> destinations(a.destinations, a.destination_count);
  const std::size_t bytes = a.count * Format::kElementBytes;
  const Prepare<Format> prepare(a);
  const Finish<Format> finish(a);

  std::size_t at = 0;
  for (; bytes - at >= kBlockStep; at += kBlockStep) {
    Vector sum[kVectors];
    const std::byte* first = sources.at(0, at);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] = changed(prepare, Format::load(first + v * kVectorStep));
    for (std::size_t s = 1; s < sources.size(); ++s) {
      const std::byte* next = sources.at(s, at);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[v] = combine<Combine>(sum[v], changed(prepare, Format::load(next + v * kVectorStep)));
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] = changed(finish, sum[v]);
    for (std::size_t d = 0; d < destinations.size(); ++d) {
      std::byte* to = destinations.at(d, at);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) Format::store(to + v * kVectorStep, sum[v]);
    }
  }
  for (; bytes - at >= kVectorStep; at += kVectorStep) {
    Vector sum = changed(prepare, Format::load(sources.at(0, at)));
    for (std::size_t s = 1; s < sources.size(); ++s) {
      sum = combine<Combine>(sum, changed(prepare, Format::load(sources.at(s, at))));
    }
    sum = changed(finish, sum);
    for (std::size_t d = 0; d < destinations.size(); ++d) Format::store(destinations.at(d, at), sum);
  }
  for (; at < bytes; at += Format::kElementBytes) {
    Value sum = changed(prepare, Format::load_one(sources.at(0, at)));
    for (std::size_t s = 1; s < sources.size(); ++s) {
      sum = combine<Combine>(sum, changed(prepare, Format::load_one(sources.at(s, at))));
    }
    sum = changed(finish, sum);
    for (std::size_t d = 0; d < destinations.size(); ++d) Format::store_one(destinations.at(d, at), sum);
  }
}

template <class Format, class Combine, template <class> class Prepare = Keep, template <class> class Finish = Keep>
void run(const ReduceArguments& a) {
  sweep<Format, Combine, Prepare, Finish, 0, 0>(a);
}

/// A loop of its own for the most frequent cases: two ranks on one host, and one step of a ring.
template <class Format>
void sum_two(const ReduceArguments& a) {
  if (a.destination_count == 1) {
    sweep<Format, Add, Keep, Keep, 2, 1>(a);
  } else if (a.destination_count == 2) {
    sweep<Format, Add, Keep, Keep, 2, 2>(a);
  } else {
    sweep<Format, Add, Keep, Keep, 2, 0>(a);
  }
}

template <class Format>
void sum_floats(const ReduceArguments& a) {
  if (a.source_count == 2) {
    sum_two<Format>(a);
  } else {
    run<Format, Add>(a);
  }
}

template <class Format>
void average_floats(const ReduceArguments& a) {
  if ((a.divide_by & (a.divide_by - 1)) == 0) {
    run<Format, Add, Keep, DivideByPowerOfTwo>(a);
  } else {
    run<Format, Add, Keep, Divide>(a);
  }
}

// ---- The table.

template <class Format>
constexpr void fill_floats(ReduceKernel (&row)[ReduceOp::kKindCount]) {
  row[ReduceOp::sum] = sum_floats<Format>;
  row[ReduceOp::avg] = average_floats<Format>;
  row[ReduceOp::product] = run<Format, Multiply>;
  row[ReduceOp::min] = run<Format, Least>;
  row[ReduceOp::max] = run<Format, Greatest>;
  row[ReduceOp::premul_sum] = run<Format, Add, Premultiply>;
}

template <class Number, class Unsigned>
constexpr void fill_integers(ReduceKernel (&row)[ReduceOp::kKindCount]) {
  row[ReduceOp::sum] = run<Direct<Unsigned>, Add>;
  row[ReduceOp::avg] = run<Direct<Unsigned>, Add, Keep, DivideAs<Number>::template Finish>;
  row[ReduceOp::product] = run<Direct<Unsigned>, Multiply>;
  row[ReduceOp::min] = run<Direct<Number>, Least>;
  row[ReduceOp::max] = run<Direct<Number>, Greatest>;
  row[ReduceOp::band] = run<Direct<Unsigned>, And>;
  row[ReduceOp::bor] = run<Direct<Unsigned>, Or>;
  row[ReduceOp::bxor] = run<Direct<Unsigned>, Xor>;
  row[ReduceOp::premul_sum] = run<Direct<Unsigned>, Add, Premultiply>;
}

constexpr void fill_truth(ReduceKernel (&row)[ReduceOp::kKindCount]) {
  row[ReduceOp::sum] = row[ReduceOp::max] = row[ReduceOp::bor] = run<Truth, Or>;
  row[ReduceOp::product] = row[ReduceOp::min] = row[ReduceOp::band] = run<Truth, And>;
  row[ReduceOp::bxor] = run<Truth, Xor>;
}

constexpr ReduceKernels make_kernels(const char* name) {
  ReduceKernels kernels;
  kernels.name = name;
  const auto row = [&kernels](DType dtype) -> auto& { return kernels.table[static_cast<int>(dtype)]; };
  fill_integers<std::int8_t, std::uint8_t>(row(DType::int8));
  fill_integers<std::int16_t, std::uint16_t>(row(DType::int16));
  fill_integers<std::int32_t, std::uint32_t>(row(DType::int32));
  fill_integers<std::int64_t, std::uint64_t>(row(DType::int64));
  fill_integers<std::uint8_t, std::uint8_t>(row(DType::uint8));
  fill_floats<Float16>(row(DType::float16));
  fill_floats<Bfloat16>(row(DType::bfloat16));
  fill_floats<Direct<float>>(row(DType::float32));
  fill_floats<Direct<double>>(row(DType::float64));
  fill_truth(row(DType::bool8));
  return kernels;
}
