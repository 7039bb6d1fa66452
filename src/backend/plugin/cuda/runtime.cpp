#include "backend/plugin/cuda/runtime.h"

#include <sys/stat.h>
#include <cstdio>
#include <cstdlib>

#include "backend/plugin/cuda/driver.h"

namespace maniple::cuda_plugin {
namespace {

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t as_event(void* event) { return static_cast<cudaEvent_t>(event); }

class CudaRuntime final : public DeviceRuntime {
 public:
  int device_count() noexcept override {
    int count = 0;
    if (::cudaGetDeviceCount(&count) == cudaSuccess) return count;
    ::cudaGetLastError();
    return 0;
  }
  std::string device_id(int device) override { return cuda_plugin::device_id(device); }
  std::string describe(int device) override;

  void* make_stream(int device) override {
    const Relaxed relaxed;
    const OnDevice on(device);
    int least = 0;
    int greatest = 0;
    check(::cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check(::cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "cudaStreamCreateWithPriority");
    return stream;
  }
  void free_stream(void* stream) noexcept override {
    const Relaxed relaxed;
    ::cudaStreamDestroy(as_stream(stream));
  }
  bool is_capturing(void* stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(::cudaStreamIsCapturing(as_stream(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  void* make_event(int device) override {
    const Relaxed relaxed;
    const OnDevice on(device);
    cudaEvent_t event = nullptr;
    check(::cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return event;
  }
  void free_event(void* event) noexcept override {
    const Relaxed relaxed;
    ::cudaEventDestroy(as_event(event));
  }
  void record(void* event, void* stream) override {
    check(::cudaEventRecord(as_event(event), as_stream(stream)), "cudaEventRecord");
  }
  void wait(void* stream, void* event) override {
    check(::cudaStreamWaitEvent(as_stream(stream), as_event(event), 0), "cudaStreamWaitEvent");
  }
  bool reached(void* event) override {
    const Relaxed relaxed;
    const cudaError_t code = ::cudaEventQuery(as_event(event));
    if (code == cudaErrorNotReady) {
      ::cudaGetLastError();
      return false;
    }
    check(code, "cudaEventQuery");
    return true;
  }

  std::byte* make_memory(int device, std::size_t bytes) override {
    const Relaxed relaxed;
    const OnDevice on(device);
    void* memory = nullptr;
    check(::cudaMalloc(&memory, bytes), "cudaMalloc");
    return static_cast<std::byte*>(memory);
  }
  void free_memory(std::byte* memory) noexcept override {
    const Relaxed relaxed;
    ::cudaFree(memory);
  }

  std::byte* make_pinned(std::size_t bytes) override {
    const Relaxed relaxed;
    void* memory = nullptr;
    check(::cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
    return static_cast<std::byte*>(memory);
  }
  void free_pinned(std::byte* memory) noexcept override {
    const Relaxed relaxed;
    ::cudaFreeHost(memory);
  }

  void copy(void* to, const void* from, std::size_t bytes, void* stream) override {
    check(::cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, as_stream(stream)), "cudaMemcpyAsync");
  }
  void wait_for_bits(void* stream, const std::uint32_t* word, std::uint32_t bits) override {
    void* address = nullptr;
    check(::cudaHostGetDevicePointer(&address, const_cast<std::uint32_t*>(word), 0), "cudaHostGetDevicePointer");
    CUstreamBatchMemOpParams wait = {};
    wait.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    wait.waitValue.address = reinterpret_cast<CUdeviceptr>(address);
    wait.waitValue.value = bits;
    wait.waitValue.flags = CU_STREAM_WAIT_VALUE_AND;
    check(driver().stream_batch(as_stream(stream), 1, &wait, 0), "cuStreamBatchMemOp");
  }
};

std::string CudaRuntime::describe(int device) {
  const OnDevice on(device);
  cudaDeviceProp properties;
  check(::cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  std::size_t free = 0;
  std::size_t total = 0;
  check(::cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  char text[160];
  std::snprintf(text, sizeof text, ", %.1f GiB (%.1f free), compute %d.%d, %s", static_cast<double>(total) / (1 << 30),
                static_cast<double>(free) / (1 << 30), properties.major, properties.minor,
                under_mps() ? "MPS" : "no MPS");
  return properties.name + std::string(text);
}

}  // namespace

DeviceRuntime* runtime() {
  static CudaRuntime instance;
  return &instance;
}

std::string device_id(int device) {
  cudaDeviceProp properties;
  check(::cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  std::string id = "GPU-";
  for (const char byte : properties.uuid.bytes) {
    char text[3];
    std::snprintf(text, sizeof text, "%02x", static_cast<unsigned char>(byte));
    id += text;
  }
  return id;
}

bool under_mps() {
  // The driver does not say. A process becomes a client when the daemon's control pipe is there as it starts to use CUDA.
  const char* folder = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  struct stat found;
  return ::stat((std::string(folder != nullptr ? folder : "/tmp/nvidia-mps") + "/control").c_str(), &found) == 0;
}

}  // namespace maniple::cuda_plugin
