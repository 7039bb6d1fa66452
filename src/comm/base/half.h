// Converts float16 and bfloat16 bits to float32 and back, without special instructions.
//
// Rounds to nearest, ties to even. A NaN becomes quiet and keeps the upper bits of its payload, as the conversion
// instructions of Arm and x86 do, so that all implementations return the same bits.
//
// Sources for larger instruction sets than the baseline also include these functions. They are always inlined;
// otherwise the linker could pick a copy compiled for a larger instruction set for the whole program.
#pragma once

#include <cstdint>

namespace maniple::half {

[[gnu::always_inline]] inline float float_from_float16(std::uint16_t bits) noexcept {
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: the mantissa counts units of 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return __builtin_bit_cast(float, sign | __builtin_bit_cast(std::uint32_t, magnitude));
  }
  if (exponent == 31) {
    const std::uint32_t quiet = mantissa != 0 ? 0x00400000u : 0u;
    return __builtin_bit_cast(float, sign | 0x7f800000u | quiet | mantissa << 13);
  }
  return __builtin_bit_cast(float, sign | (exponent + 112) << 23 | mantissa << 13);
}

[[gnu::always_inline]] inline std::uint16_t float16_from_float(float value) noexcept {
  constexpr std::uint32_t kInfinity = 0x7f800000u;
  constexpr std::uint32_t kRoundsToInfinity = 0x477ff000u;  // 65520, half-way between the largest float16 and the next
  constexpr std::uint32_t kSmallestNormal = 0x38800000u;    // 2^-14
  constexpr std::uint32_t kRoundsToZero = 0x33000000u;      // 2^-25: a tie, and zero is even
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t result = 0;
  if (magnitude > kInfinity) {
    result = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= kRoundsToInfinity) {
    result = 0x7c00u;
  } else if (magnitude >= kSmallestNormal) {
    const std::uint32_t odd = (magnitude >> 13) & 1u;
    result = (magnitude - 0x38000000u + 0xfffu + odd) >> 13;  // a carry out of the mantissa raises the exponent
  } else if (magnitude > kRoundsToZero) {
    const std::uint32_t shift = 126 - (magnitude >> 23);  // 14 .. 24
    const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t odd = (mantissa >> shift) & 1u;
    result = (mantissa + (1u << (shift - 1)) - 1u + odd) >> shift;
  }
  return static_cast<std::uint16_t>(sign | result);
}

[[gnu::always_inline]] inline float float_from_bfloat16(std::uint16_t bits) noexcept {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
}

[[gnu::always_inline]] inline std::uint16_t bfloat16_from_float(float value) noexcept {
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace maniple::half
