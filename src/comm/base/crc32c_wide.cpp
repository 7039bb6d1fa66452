// CRC-32C by carry-less multiplication of vectors: AVX-512 with VPCLMULQDQ (four to five times as fast as the
// processor's CRC instruction), or Arm's PMULL (about twice as fast; two and a half times together with the CRC
// instruction). This file is compiled with its own flags, so none of it may run unless `crc32c_has_wide`, and it must
// not use inline functions that other files use, too.
//
// A *step* of 256 or 144 bytes fills several vectors. In each round the vectors are shifted past the next step, which
// is then added: their contents stay congruent to all bytes so far, modulo the polynomial. The CRC instruction reduces
// the last step.
//
// Shifting past n bytes means multiplying by x^(8n). A vector's 128-bit lane is a polynomial with its bits reversed;
// its lower half is 64 powers above the upper. The product of two reversed 64-bit words is one place too low, so the
// exponent of each factor is one less.
#include "comm/base/crc32c.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

namespace maniple {

#if defined(__x86_64__) || defined(__aarch64__)

namespace {

#if defined(__x86_64__)
constexpr std::size_t kStep = 256;
#else
constexpr std::size_t kStep = 144;
#endif

constexpr std::uint64_t factor(std::size_t power) {
  return static_cast<std::uint64_t>(crc32c_polynomial::power_of_x(power - 1)) << 32;
}
constexpr std::uint64_t kLowerFactor = factor(8 * kStep + 64);
constexpr std::uint64_t kUpperFactor = factor(8 * kStep);

#if defined(__x86_64__)

using Vector = __m512i;
[[gnu::always_inline]] inline Vector load(const unsigned char* from) { return _mm512_loadu_si512(from); }
[[gnu::always_inline]] inline void store(unsigned char* to, Vector value) { _mm512_storeu_si512(to, value); }
[[gnu::always_inline]] inline Vector with_seed(Vector first, std::uint32_t crc) {
  return _mm512_xor_si512(first, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
}
[[gnu::always_inline]] inline Vector factors() {
  const auto lower = static_cast<long long>(kLowerFactor);
  const auto upper = static_cast<long long>(kUpperFactor);
  return _mm512_set_epi64(upper, lower, upper, lower, upper, lower, upper, lower);
}
[[gnu::always_inline]] inline Vector step(Vector sum, Vector by, Vector next) {
  constexpr int kXor3 = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, by, 0x00), _mm512_clmulepi64_epi128(sum, by, 0x11),
                                   next, kXor3);
}

#else

using Vector = uint64x2_t;
[[gnu::always_inline]] inline Vector load(const unsigned char* from) { return vreinterpretq_u64_u8(vld1q_u8(from)); }
[[gnu::always_inline]] inline void store(unsigned char* to, Vector value) { vst1q_u8(to, vreinterpretq_u8_u64(value)); }
[[gnu::always_inline]] inline Vector with_seed(Vector first, std::uint32_t crc) {
  return veorq_u64(first, vsetq_lane_u64(crc, vdupq_n_u64(0), 0));
}
[[gnu::always_inline]] inline Vector factors() {
  return vcombine_u64(vcreate_u64(kLowerFactor), vcreate_u64(kUpperFactor));
}
[[gnu::always_inline]] inline Vector step(Vector sum, Vector by, Vector next) {
  const auto lower =
      vmull_p64(static_cast<poly64_t>(vgetq_lane_u64(sum, 0)), static_cast<poly64_t>(vgetq_lane_u64(by, 0)));
  const auto upper = vmull_high_p64(vreinterpretq_p64_u64(sum), vreinterpretq_p64_u64(by));
  return veorq_u64(veorq_u64(vreinterpretq_u64_p128(lower), next), vreinterpretq_u64_p128(upper));
}

// The multiplications leave the CRC instruction idle. For large inputs, the last third therefore goes to three *lanes*:
// the CRC instruction processes several words of each lane per vector step, and the lanes' values are joined at the
// end.
constexpr std::size_t kLane = 24;             // bytes of each lane per step
constexpr std::size_t kWorthLanes = 1 << 14;  // joining costs about as much as processing 1 KiB

[[gnu::always_inline]] inline std::uint64_t load8(const unsigned char* from) {
  std::uint64_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return word;
}

/// a * b * x^33: reversed words add one power, and the instruction that reduces the product adds 32. So multiplying by
/// x^(n - 33) shifts past n bits.
constexpr std::size_t kSurplus = 33;
[[gnu::always_inline]] inline std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  return __crc32cd(0, vgetq_lane_u64(vreinterpretq_u64_p128(vmull_p64(a, b)), 0));
}

/// The factor that shifts a value past a lane of `steps` steps.
std::uint32_t past_lanes(std::size_t steps) {
  std::uint32_t power = crc32c_polynomial::power_of_x(8 * kLane - kSurplus);
  for (; (steps & 1) == 0; steps >>= 1) power = multiply(power, power);
  std::uint32_t past = power;
  for (steps >>= 1; steps != 0; steps >>= 1) {
    power = multiply(power, power);
    if ((steps & 1) != 0) past = multiply(past, power);
  }
  return past;
}

#endif

constexpr std::size_t kVectors = kStep / sizeof(Vector);

}  // namespace

std::uint32_t crc32c_wide(std::uint32_t seed, const void* data, std::size_t size) noexcept {
  constexpr std::size_t kWorthwhile = 4 * kStep;
  if (size < kWorthwhile) return crc32c_hardware(seed, data, size);
  const auto* at = static_cast<const unsigned char*>(data);
  const auto* const end = at + size;
  const Vector by = factors();
  Vector sums[kVectors];
  for (std::size_t i = 0; i < kVectors; ++i) sums[i] = load(at + i * sizeof(Vector));
  sums[0] = with_seed(sums[0], ~seed);
  at += kStep;
  const auto take_step = [&]() __attribute__((always_inline)) {
    for (std::size_t i = 0; i < kVectors; ++i) sums[i] = step(sums[i], by, load(at + i * sizeof(Vector)));
    at += kStep;
  };
  const auto value = [&]() __attribute__((always_inline)) {
    unsigned char rest[kStep];
    for (std::size_t i = 0; i < kVectors; ++i) store(rest + i * sizeof(Vector), sums[i]);
    // The sums already contain the seed, so this continues from a register of zero: as a seed, its complement.
    return crc32c_hardware(~std::uint32_t{0}, rest, kStep);
  };
#if defined(__aarch64__)
  if (size >= kWorthLanes) {
    const std::size_t steps = (size - kStep) / (kStep + 3 * kLane);
    const std::size_t lane = steps * kLane;
    const auto* beside = at + steps * kStep;
    std::uint32_t first = 0, second = 0, third = 0;
    for (std::size_t taken = 0; taken < steps; ++taken) {
      take_step();
      for (const auto* const until = beside + kLane; beside != until; beside += 8) {
        first = __crc32cd(first, load8(beside));
        second = __crc32cd(second, load8(beside + lane));
        third = __crc32cd(third, load8(beside + 2 * lane));
      }
    }
    const std::uint32_t past = past_lanes(steps);
    const std::uint32_t crc = multiply(multiply(multiply(~value(), past) ^ first, past) ^ second, past) ^ third;
    at += 3 * lane;
    return crc32c_hardware(~crc, at, end - at);
  }
#endif
  while (static_cast<std::size_t>(end - at) >= kStep) take_step();
  return crc32c_hardware(value(), at, end - at);
}

bool crc32c_has_wide() noexcept {
#if defined(__aarch64__)
  constexpr unsigned long kPmull = 1UL << 4;  // HWCAP_PMULL
  return crc32c_has_hardware() && (::getauxval(AT_HWCAP) & kPmull) != 0;
#else
  return crc32c_has_hardware() && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0;
#endif
}

#else

std::uint32_t crc32c_wide(std::uint32_t seed, const void* data, std::size_t size) noexcept {
  return crc32c_hardware(seed, data, size);
}
bool crc32c_has_wide() noexcept { return false; }

#endif

}  // namespace maniple
