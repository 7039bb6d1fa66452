#include "comm/base/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#include <unistd.h>
#endif

namespace maniple {

#ifdef __SSE2__

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kPiece = 128;

/// Interleaves the lines of several pages, so that memory works on all of them at once.
template <std::size_t kPages>
void stream_pages(std::byte* to, const std::byte* from) noexcept {
  for (std::size_t at = 0; at < kPage; at += kPiece) {
    for (std::size_t page = 0; page < kPages; ++page) {
      const auto* source = reinterpret_cast<const __m128i*>(from + page * kPage + at);
      auto* target = reinterpret_cast<__m128i*>(to + page * kPage + at);
      __m128i piece[kPiece / sizeof(__m128i)];
      for (__m128i& part : piece) part = _mm_loadu_si128(source++);
      for (const __m128i& part : piece) _mm_stream_si128(target++, part);
    }
  }
}

}  // namespace

bool exceeds_caches(std::size_t bytes, int ranks) noexcept {
  static const std::size_t cache = [] {
    constexpr std::size_t kUsual = std::size_t{32} << 20;
    const long known = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
    return known > 0 ? static_cast<std::size_t>(known) : kUsual;
  }();
  // The sources are as large as the results, and half of the cache holds other data, including other virtual machines'.
  return bytes >= cache / 4 / std::max(ranks, 1);
}

void copy_past_caches(void* to, const void* from, std::size_t bytes) noexcept {
  constexpr std::size_t kLine = 64;
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  const auto advance = [&](std::size_t by) {
    target += by;
    source += by;
    bytes -= by;
  };
  if (const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(target) % kLine) % kLine; head <= bytes) {
    if (head != 0) std::memcpy(target, source, head);
    advance(head);
    for (; bytes >= 4 * kPage; advance(4 * kPage)) stream_pages<4>(target, source);
    for (; bytes >= kPage; advance(kPage)) stream_pages<1>(target, source);
    _mm_sfence();  // before this rank signals others
  }
  if (bytes != 0) std::memcpy(target, source, bytes);
}

#else

bool exceeds_caches(std::size_t, int) noexcept { return false; }
void copy_past_caches(void* to, const void* from, std::size_t bytes) noexcept {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

#endif

}  // namespace maniple
