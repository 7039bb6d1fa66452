#include "base/ticks.h"

namespace maniple {
namespace {

double measure() noexcept {
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

}  // namespace

double ticks_per_second() noexcept {
  static const double kFrequency = measure();
  return kFrequency;
}

}  // namespace maniple
