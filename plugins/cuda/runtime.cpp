#include "plugins/cuda/runtime.h"

#include <sys/stat.h>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "plugins/cuda/driver.h"

namespace maniple::cuda_plugin {
namespace {

cudaStream_t as_stream(DeviceStream stream) { return static_cast<cudaStream_t>(stream.handle); }
cudaEvent_t as_event(DeviceEvent event) { return static_cast<cudaEvent_t>(event.handle); }

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

  DeviceStream make_stream(int device) override {
    const Relaxed relaxed;
    const OnDevice on(device);
    int least = 0;
    int greatest = 0;
    check(::cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check(::cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "cudaStreamCreateWithPriority");
    return {device, stream};
  }
  void free_stream(DeviceStream stream) noexcept override {
    const Relaxed relaxed;
    const OnDevice on(stream.device, std::nothrow);
    ::cudaStreamDestroy(as_stream(stream));
  }
  bool is_capturing(DeviceStream stream) override {
    const OnDevice on(stream.device);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(::cudaStreamIsCapturing(as_stream(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  DeviceEvent make_event(int device) override {
    const Relaxed relaxed;
    const OnDevice on(device);
    cudaEvent_t event = nullptr;
    check(::cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return {device, event};
  }
  void free_event(DeviceEvent event) noexcept override {
    const Relaxed relaxed;
    const OnDevice on(event.device, std::nothrow);
    ::cudaEventDestroy(as_event(event));
  }
  void record(DeviceEvent event, DeviceStream stream) override {
    const OnDevice on(stream.device);
    check(::cudaEventRecord(as_event(event), as_stream(stream)), "cudaEventRecord");
  }
  void wait(DeviceStream stream, DeviceEvent event) override {
    const OnDevice on(stream.device);
    check(::cudaStreamWaitEvent(as_stream(stream), as_event(event), 0), "cudaStreamWaitEvent");
  }
  bool reached(DeviceEvent event) override {
    const Relaxed relaxed;
    const OnDevice on(event.device);
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
  void free_memory(int device, std::byte* memory) noexcept override {
    const Relaxed relaxed;
    const OnDevice on(device, std::nothrow);
    ::cudaFree(memory);
  }

  std::byte* make_pinned(int device, std::size_t bytes) override {
    const Relaxed relaxed;
    const OnDevice on(device);
    void* memory = nullptr;
    check(::cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
    return static_cast<std::byte*>(memory);
  }
  void free_pinned(int device, std::byte* memory) noexcept override {
    const Relaxed relaxed;
    const OnDevice on(device, std::nothrow);
    ::cudaFreeHost(memory);
  }

  void copy(void* to, const void* from, std::size_t bytes, DeviceStream stream) override {
    const OnDevice on(stream.device);
    check(::cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, as_stream(stream)), "cudaMemcpyAsync");
  }
  void wait_for_bits(DeviceStream stream, const std::uint32_t* word, std::uint32_t bits) override {
    const OnDevice on(stream.device);
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
  // The driver does not report this. A process becomes an MPS client if the daemon's control pipe exists when the
  // process starts to use CUDA.
  const char* folder = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  struct stat found;
  return ::stat((std::string(folder != nullptr ? folder : "/tmp/nvidia-mps") + "/control").c_str(), &found) == 0;
}

}  // namespace maniple::cuda_plugin
