// The processor's own counter: a few nanoseconds to read, compared with twenty or more for clock_gettime. For time
// stamps in records; deadlines use the monotonic clock.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace maniple {

inline std::uint64_t ticks() noexcept {
#if defined(__aarch64__)
  std::uint64_t value = 0;
  asm volatile("mrs %0, cntvct_el0" : "=r"(value));
  return value;
#elif defined(__x86_64__)
  return __rdtsc();
#else
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

/// Ticks per second: reported by the processor (Arm), or measured, which takes two milliseconds.
inline double measure_ticks_per_second() noexcept {
#if defined(__aarch64__)
  std::uint64_t frequency = 0;
  asm volatile("mrs %0, cntfrq_el0" : "=r"(frequency));
  return static_cast<double>(frequency);
#else
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const std::uint64_t first = ticks();
  while (Clock::now() - start < std::chrono::milliseconds(2)) {
  }
  const std::chrono::duration<double> passed = Clock::now() - start;
  return static_cast<double>(ticks() - first) / passed.count();
#endif
}
/// The same, measured once per process.
inline double ticks_per_second() noexcept {
  static const double kFrequency = measure_ticks_per_second();
  return kFrequency;
}

/// Hints to the processor that this is a spin loop.
inline void relax() noexcept {
#if defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // a short pause; `yield` is a no-op on most cores
#elif defined(__x86_64__)
  _mm_pause();
#endif
}

// Arm's load-acquire waits until this thread's earlier store-releases are visible to other cores. Only sequentially
// consistent operations need that in C++, and it costs 30 ns of an 8-byte operation. A plain load and a fence avoid it.
// (ThreadSanitizer does not support fences.)
#if defined(__SANITIZE_THREAD__)
#define MANIPLE_FENCES 0
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define MANIPLE_FENCES 0
#endif
#endif
#if !defined(MANIPLE_FENCES) && defined(__aarch64__)
#define MANIPLE_FENCES 1
#endif

template <class T>
T load_acquire(const std::atomic<T>& word) noexcept {
#if MANIPLE_FENCES
  const T value = word.load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  return value;
#else
  return word.load(std::memory_order_acquire);
#endif
}

/// Sets `word` and returns its previous value.
inline bool exchange_acquire(std::atomic<bool>& word) noexcept {
#if MANIPLE_FENCES
  const bool before = word.exchange(true, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  return before;
#else
  return word.exchange(true, std::memory_order_acquire);
#endif
}

/// Prefetches a cache line for writing.
inline void fetch_to_write(const void* line) noexcept {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(line)));  // the builtin would only fetch it to read
#else
  __builtin_prefetch(line, 1);
#endif
}

}  // namespace maniple
