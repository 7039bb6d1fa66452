#include "base/threads.h"

#include <pthread.h>

#include <atomic>

namespace maniple {
namespace {

std::atomic<std::uint32_t> generation{0};

bool watch() noexcept {
  ::pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  return true;
}

const bool kWatching = watch();

}  // namespace

std::uint32_t fork_generation() noexcept {
  (void)kWatching;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace maniple
