#include "train/optim/kernels.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#include <c10/util/Half.h>

namespace maniple {
namespace {

/// Elements per thread: starting a thread takes about 20 us, processing that many elements about 300 us.
constexpr std::size_t kElementsOfThread = std::size_t{1} << 18;

// ---- Storage formats, and the type in which elements are computed. --------------------------------------------------

template <class T>
struct AsStored {
  using Stored = T;
  using Value = T;
  [[gnu::always_inline]] static Value load(Stored stored) { return stored; }
  [[gnu::always_inline]] static Stored store(Value value) { return value; }
};

struct InBfloat16 {
  using Stored = std::uint16_t;
  using Value = float;
  [[gnu::always_inline]] static Value load(Stored bits) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
  }
  /// Rounds to nearest, ties to even. NaN is handled separately: the rounding carry would turn some NaNs into infinity.
  [[gnu::always_inline]] static Stored store(Value value) {
    const auto bits = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<Stored>(value != value ? 0x7fc0u : rounded);
  }
};

struct InFloat16 {
  using Stored = c10::Half;
  using Value = float;
  [[gnu::always_inline]] static Value load(Stored stored) { return static_cast<float>(stored); }
  [[gnu::always_inline]] static Stored store(Value value) { return static_cast<Stored>(value); }
};

// ---- Update formulas for parameter p and states from gradient g, in the order of torch::optim's operations. ---------

enum class Momentum { none, plain, nesterov };

template <class V, Momentum kMomentum, bool kL2>
struct SgdRule {
  static constexpr int kStates = kMomentum == Momentum::none ? 0 : 1;
  V minus_lr, momentum, weight_decay, sign, of_buffer, of_gradient;
  SgdRule(const StepConstants& c, const double* own)
      : minus_lr(V(-c.lr)),
        momentum(V(c.beta1)),
        weight_decay(V(c.weight_decay)),
        sign(V(c.sign)),
        of_buffer(V(own[0])),
        of_gradient(V(own[1])) {}
  [[gnu::always_inline]] void operator()(V& p, V g, V& buffer, V&, V&) const {
    g = g * sign;
    if constexpr (kL2) g = g + weight_decay * p;
    if constexpr (kMomentum != Momentum::none) buffer = buffer * of_buffer + of_gradient * g;
    if constexpr (kMomentum == Momentum::plain) g = buffer;
    if constexpr (kMomentum == Momentum::nesterov) g = g + momentum * buffer;
    p = p + minus_lr * g;
  }
};

template <class V, bool kAmsgrad, bool kL2>
struct AdamRule {
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  V beta1, rest1, beta2, rest2, eps, weight_decay, keep, sign, minus_step, correction;
  AdamRule(const StepConstants& c, const double* own)
      : beta1(V(c.beta1)),
        rest1(V(1 - c.beta1)),
        beta2(V(c.beta2)),
        rest2(V(1 - c.beta2)),
        eps(V(c.eps)),
        weight_decay(V(c.weight_decay)),
        keep(V(c.keep)),
        sign(V(c.sign)),
        minus_step(V(-own[0])),
        correction(V(own[1])) {}
  [[gnu::always_inline]] void operator()(V& p, V g, V& average, V& square, V& largest) const {
    g = g * sign;
    if constexpr (kL2) g = g + weight_decay * p;
    p = p * keep;
    average = average * beta1 + rest1 * g;
    square = square * beta2 + rest2 * g * g;
    V second = square;
    if constexpr (kAmsgrad) {
      largest = square > largest || square != square ? square : largest;  // NaN is kept
      second = largest;
    }
    V root;
    if constexpr (std::is_same_v<V, double>) {
      root = __builtin_sqrt(second);
    } else {
      root = __builtin_sqrtf(second);
    }
    p = p + minus_step * average / (root / correction + eps);
  }
};

template <class V>
struct LionRule {
  static constexpr int kStates = 1;
  V lr, beta1, rest1, beta2, rest2, keep, sign;
  LionRule(const StepConstants& c, const double*)
      : lr(V(c.lr)),
        beta1(V(c.beta1)),
        rest1(V(1 - c.beta1)),
        beta2(V(c.beta2)),
        rest2(V(1 - c.beta2)),
        keep(V(c.keep)),
        sign(V(c.sign)) {}
  [[gnu::always_inline]] void operator()(V& p, V g, V& average, V&, V&) const {
    g = g * sign;
    const V direction = average * beta1 + rest1 * g;
    p = p * keep - (direction > 0 ? lr : direction < 0 ? -lr : direction);  // NaN is kept
    average = average * beta2 + rest2 * g;
  }
};

// ---- The loop, instantiated for each format and formula. ------------------------------------------------------------

template <class Format, bool kMaster, class Rule, class State>
[[gnu::always_inline]] inline void loop(const Rule rule, typename Format::Stored* __restrict parameter,
                                        const typename Format::Stored* __restrict gradient, float* __restrict master,
                                        typename State::Stored* __restrict a, typename State::Stored* __restrict b,
                                        typename State::Stored* __restrict c, std::size_t count) {
  using V = typename Format::Value;
  for (std::size_t i = 0; i < count; ++i) {
    V p, x{}, y{}, z{};
    if constexpr (kMaster) {
      p = master[i];
    } else {
      p = Format::load(parameter[i]);
    }
    if constexpr (Rule::kStates > 0) x = State::load(a[i]);
    if constexpr (Rule::kStates > 1) y = State::load(b[i]);
    if constexpr (Rule::kStates > 2) z = State::load(c[i]);
    rule(p, Format::load(gradient[i]), x, y, z);
    if constexpr (kMaster) master[i] = p;
    parameter[i] = Format::store(p);
    if constexpr (Rule::kStates > 0) a[i] = State::store(x);
    if constexpr (Rule::kStates > 1) b[i] = State::store(y);
    if constexpr (Rule::kStates > 2) c[i] = State::store(z);
  }
}

template <class Format, bool kMaster, class Rule>
[[gnu::always_inline]] inline void run_part(const StepConstants& constants, const StepTensor& t, std::size_t begin,
                                            std::size_t end) {
  using State = std::conditional_t<kMaster, AsStored<float>, Format>;
  const auto at = [begin](void* states) {
    return states == nullptr ? nullptr : static_cast<typename State::Stored*>(states) + begin;
  };
  loop<Format, kMaster, Rule, State>(Rule(constants, t.own), static_cast<typename Format::Stored*>(t.parameter) + begin,
                                     static_cast<const typename Format::Stored*>(t.gradient) + begin,
                                     kMaster ? t.master + begin : nullptr, at(t.states[0]), at(t.states[1]),
                                     at(t.states[2]), end - begin);
}

using RunPart = void (*)(const StepConstants&, const StepTensor&, std::size_t begin, std::size_t end);

template <class Format, bool kMaster, class Rule>
void run_baseline(const StepConstants& constants, const StepTensor& tensor, std::size_t begin, std::size_t end) {
  run_part<Format, kMaster, Rule>(constants, tensor, begin, end);
}

#if defined(__x86_64__)
template <class Format, bool kMaster, class Rule>
[[gnu::target("avx2")]] void run_avx2(const StepConstants& constants, const StepTensor& tensor, std::size_t begin,
                                      std::size_t end) {
  run_part<Format, kMaster, Rule>(constants, tensor, begin, end);
}
#endif

template <class Format, bool kMaster, class Rule>
RunPart best() {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2") != 0;
  if (avx2) return run_avx2<Format, kMaster, Rule>;
#endif
  return run_baseline<Format, kMaster, Rule>;
}

template <class Format, bool kMaster>
RunPart find(StepKernel kernel) {
  using V = typename Format::Value;
  switch (kernel) {
    case StepKernel::sgd: return best<Format, kMaster, SgdRule<V, Momentum::none, false>>();
    case StepKernel::sgd_l2: return best<Format, kMaster, SgdRule<V, Momentum::none, true>>();
    case StepKernel::momentum: return best<Format, kMaster, SgdRule<V, Momentum::plain, false>>();
    case StepKernel::momentum_l2: return best<Format, kMaster, SgdRule<V, Momentum::plain, true>>();
    case StepKernel::nesterov: return best<Format, kMaster, SgdRule<V, Momentum::nesterov, false>>();
    case StepKernel::nesterov_l2: return best<Format, kMaster, SgdRule<V, Momentum::nesterov, true>>();
    case StepKernel::adam: return best<Format, kMaster, AdamRule<V, false, false>>();
    case StepKernel::adam_l2: return best<Format, kMaster, AdamRule<V, false, true>>();
    case StepKernel::amsgrad: return best<Format, kMaster, AdamRule<V, true, false>>();
    case StepKernel::amsgrad_l2: return best<Format, kMaster, AdamRule<V, true, true>>();
    case StepKernel::lion: break;
  }
  return best<Format, kMaster, LionRule<V>>();
}

RunPart find(StepKernel kernel, StepDtype dtype, bool master) {
  switch (dtype) {
    case StepDtype::float64: return find<AsStored<double>, false>(kernel);
    case StepDtype::float16: return master ? find<InFloat16, true>(kernel) : find<InFloat16, false>(kernel);
    case StepDtype::bfloat16: return master ? find<InBfloat16, true>(kernel) : find<InBfloat16, false>(kernel);
    case StepDtype::float32: break;
  }
  return find<AsStored<float>, false>(kernel);
}

}  // namespace

void run_step(StepKernel kernel, StepDtype dtype, const StepConstants& constants, std::span<const StepTensor> tensors,
              int threads) {
  if (tensors.empty()) return;
  const RunPart run = find(kernel, dtype, tensors.front().master != nullptr);
  std::size_t total = 0;
  for (const StepTensor& tensor : tensors) total += tensor.count;

  // Processes elements begin .. end of all tensors, counted consecutively.
  const auto run_range = [&](std::size_t begin, std::size_t end) {
    std::size_t first = 0;
    for (const StepTensor& tensor : tensors) {
      if (first >= end) return;
      const std::size_t from = std::max(begin, first), to = std::min(end, first + tensor.count);
      if (from < to) run(constants, tensor, from - first, to - first);
      first += tensor.count;
    }
  };
  const std::size_t parts =
      std::clamp<std::size_t>(total / kElementsOfThread, 1, static_cast<std::size_t>(std::max(1, threads)));
  const auto boundary = [&](std::size_t part) { return part == parts ? total : total / parts * part; };
  std::vector<std::thread> others;
  for (std::size_t part = 1; part < parts; ++part) {
    try {
      others.emplace_back(run_range, boundary(part), boundary(part + 1));
    } catch (const std::system_error&) {  // the system has no more threads
      run_range(boundary(part), boundary(part + 1));
    }
  }
  run_range(0, boundary(1));
  for (std::thread& other : others) other.join();
}

}  // namespace maniple
