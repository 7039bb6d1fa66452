// CRC-32C by carry-less multiplication of 512-bit vectors (AVX-512 with VPCLMULQDQ): four to five times as fast as the
// processor's CRC instruction. Compiled with flags of its own, so nothing of this file may run unless `crc32c_has_wide`,
// and it uses no inline function that others use too.
//
// Four vectors hold 256 bytes. A step moves each past the next 256 bytes and adds those: what remains in the vectors is
// congruent to all bytes so far, modulo the polynomial. The 256 bytes at the end are then taken in the ordinary way.
//
// Moving past n bytes is multiplying by x^(8n). A vector's 128-bit lane is a polynomial with its bits reversed; its lower
// half is 64 powers above the upper. A product of two reversed 64-bit words stands one place too low, so the factors
// have one power less.
#include "base/crc32c.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace maniple {
namespace {

constexpr std::size_t kVector = 64;
constexpr std::size_t kStep = 4 * kVector;

constexpr std::uint64_t factor(std::size_t power) {
  return static_cast<std::uint64_t>(crc32c_polynomial::power_of_x(power - 1)) << 32;
}
constexpr std::uint64_t kLowerFactor = factor(8 * kStep + 64);
constexpr std::uint64_t kUpperFactor = factor(8 * kStep);

[[gnu::always_inline]] inline __m512i load(const unsigned char* from) { return _mm512_loadu_si512(from); }

[[gnu::always_inline]] inline __m512i step(__m512i sum, __m512i factors, __m512i next) {
  constexpr int kXor3 = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, factors, 0x00),
                                   _mm512_clmulepi64_epi128(sum, factors, 0x11), next, kXor3);
}

}  // namespace

std::uint32_t crc32c_wide(std::uint32_t seed, const void* data, std::size_t size) noexcept {
  constexpr std::size_t kWorthwhile = 4 * kStep;
  if (size < kWorthwhile) return crc32c_hardware(seed, data, size);
  const auto* at = static_cast<const unsigned char*>(data);
  const auto lower = static_cast<long long>(kLowerFactor);
  const auto upper = static_cast<long long>(kUpperFactor);
  const __m512i factors = _mm512_set_epi64(upper, lower, upper, lower, upper, lower, upper, lower);
  __m512i sums[4];
  for (std::size_t i = 0; i < 4; ++i) sums[i] = load(at + i * kVector);
  sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~seed))));
  for (at += kStep, size -= kStep; size >= kStep; at += kStep, size -= kStep) {
    for (std::size_t i = 0; i < 4; ++i) sums[i] = step(sums[i], factors, load(at + i * kVector));
  }
  alignas(kVector) unsigned char rest[kStep];
  for (std::size_t i = 0; i < 4; ++i) _mm512_store_si512(rest + i * kVector, sums[i]);
  // The seed is within: this goes on from a register of zero, which is the complement of the seed that stands for it.
  return crc32c_hardware(crc32c_hardware(~std::uint32_t{0}, rest, kStep), at, size);
}

bool crc32c_has_wide() noexcept {
  return crc32c_has_hardware() && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0;
}

}  // namespace maniple

#else

namespace maniple {

std::uint32_t crc32c_wide(std::uint32_t seed, const void* data, std::size_t size) noexcept {
  return crc32c_hardware(seed, data, size);
}
bool crc32c_has_wide() noexcept { return false; }

}  // namespace maniple

#endif
