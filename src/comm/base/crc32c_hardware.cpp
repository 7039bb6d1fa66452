// CRC-32C by the processor's instruction: Arm's CRC extension, or SSE 4.2. This file is compiled with its own flags, so
// none of it may run unless `crc32c_has_hardware`, and it must not use inline functions that other files use, too.
//
// The instruction accepts a word per cycle, but its result is available two or three cycles later. So data is cut into
// stretches of three equal lanes, whose checksums are computed in parallel and then joined: four table lookups multiply
// a lane's value to shift it past the bytes of the lanes after it.
#include "comm/base/crc32c.h"

#if defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace maniple {

#if defined(__aarch64__) || defined(__x86_64__)

namespace {

#if defined(__aarch64__)
[[gnu::always_inline]] inline std::uint32_t take8(std::uint32_t crc, std::uint64_t word) {
  return __crc32cd(crc, word);
}
[[gnu::always_inline]] inline std::uint32_t take1(std::uint32_t crc, std::uint8_t byte) { return __crc32cb(crc, byte); }
#else
[[gnu::always_inline]] inline std::uint32_t take8(std::uint32_t crc, std::uint64_t word) {
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}
[[gnu::always_inline]] inline std::uint32_t take1(std::uint32_t crc, std::uint8_t byte) {
  return _mm_crc32_u8(crc, byte);
}
#endif

[[gnu::always_inline]] inline std::uint64_t load8(const unsigned char* from) {
  std::uint64_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return word;
}

constexpr std::size_t kLane = 256;  // longer lanes defeat the prefetcher, shorter lanes are joined too often

/// kPast.of[i][b]: the contribution of byte i, with value b, shifted past the bytes of a lane.
struct Past {
  std::uint32_t of[4][256];
};
constexpr Past make_past() {
  Past past{};
  for (int place = 0; place < 4; ++place) {
    const auto table = crc32c_polynomial::byte_table(crc32c_polynomial::zero_bytes(kLane), place);
    for (std::size_t b = 0; b < 256; ++b) past.of[place][b] = table[b];
  }
  return past;
}
constexpr Past kPast = make_past();

[[gnu::always_inline]] inline std::uint32_t past_lane(std::uint32_t crc) {
  return kPast.of[0][crc & 0xff] ^ kPast.of[1][(crc >> 8) & 0xff] ^ kPast.of[2][(crc >> 16) & 0xff] ^
         kPast.of[3][crc >> 24];
}

}  // namespace

std::uint32_t crc32c_hardware(std::uint32_t seed, const void* data, std::size_t size) noexcept {
  const auto* at = static_cast<const unsigned char*>(data);
  std::uint32_t crc = ~seed;
  for (; size >= 3 * kLane; at += 3 * kLane, size -= 3 * kLane) {
    std::uint32_t second = 0;
    std::uint32_t third = 0;
    for (std::size_t i = 0; i < kLane; i += 8) {
      crc = take8(crc, load8(at + i));
      second = take8(second, load8(at + kLane + i));
      third = take8(third, load8(at + 2 * kLane + i));
    }
    crc = past_lane(past_lane(crc) ^ second) ^ third;
  }
  for (; size >= 8; at += 8, size -= 8) crc = take8(crc, load8(at));
  for (; size != 0; ++at, --size) crc = take1(crc, *at);
  return ~crc;
}

bool crc32c_has_hardware() noexcept {
#if defined(__aarch64__)
  constexpr unsigned long kCrc32 = 1UL << 7;  // HWCAP_CRC32
  return (::getauxval(AT_HWCAP) & kCrc32) != 0;
#else
  return __builtin_cpu_supports("sse4.2") != 0;
#endif
}

#else

std::uint32_t crc32c_hardware(std::uint32_t seed, const void* data, std::size_t size) noexcept {
  return crc32c_tables(seed, data, size);
}
bool crc32c_has_hardware() noexcept { return false; }

#endif

}  // namespace maniple
