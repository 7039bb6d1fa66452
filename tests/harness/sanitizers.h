// Detects sanitizers, which slow programs down by a factor, so that tests can raise limits and lower counts.
#pragma once

#if defined(__SANITIZE_THREAD__)
#define MANIPLE_TEST_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define MANIPLE_TEST_TSAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define MANIPLE_TEST_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MANIPLE_TEST_ASAN 1
#endif
#endif

namespace maniple::harness {

#if defined(MANIPLE_TEST_TSAN)
inline constexpr bool kSanitized = true;
inline constexpr double kSlowdown = 8;
#elif defined(MANIPLE_TEST_ASAN)
inline constexpr bool kSanitized = true;
inline constexpr double kSlowdown = 3;
#else
inline constexpr bool kSanitized = false;
inline constexpr double kSlowdown = 1;
#endif

}  // namespace maniple::harness
