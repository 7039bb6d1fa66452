#include "harness/device_memory.h"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#ifdef MANIPLE_TEST_CUDA
#include <cuda_runtime_api.h>

#include "harness/leaks.h"
#endif

namespace maniple::harness {

Device test_device() {
  static const bool kCuda = [] {
    const char* name = std::getenv("MANIPLE_TEST_DEVICE");
    return name != nullptr && std::string_view(name) == "cuda";
  }();
  return kCuda ? Device::cuda(0) : Device{};
}

#ifdef MANIPLE_TEST_CUDA
namespace {

void require(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

// Resources that the driver keeps for the whole process do not count as a test's leak.
const bool kStarted = call_before_first_count([] {
  if (!test_device().is_cpu()) require(cudaFree(nullptr), "cudaFree(nullptr)");
});

}  // namespace

void synchronize_device() {
  if (!test_device().is_cpu()) require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}
#else
void synchronize_device() {}
#endif

std::shared_ptr<std::byte> test_memory(std::size_t bytes) {
  if (test_device().is_cpu()) {
    const std::size_t whole = (bytes + 4095) / 4096 * 4096;
    return {static_cast<std::byte*>(std::aligned_alloc(4096, whole)), &std::free};
  }
#ifdef MANIPLE_TEST_CUDA
  void* memory = nullptr;
  require(cudaMallocManaged(&memory, bytes), "cudaMallocManaged");
  return {static_cast<std::byte*>(memory), [](std::byte* it) { cudaFree(it); }};
#else
  throw std::runtime_error("MANIPLE_TEST_DEVICE=cuda, but these tests were built without CUDA");
#endif
}

}  // namespace maniple::harness
