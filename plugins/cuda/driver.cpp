#include "plugins/cuda/driver.h"

#include <exception>
#include <map>
#include <mutex>

#include "comm/base/fork_guard.h"
#include <maniple/comm/error.h>

namespace maniple::cuda_plugin {
namespace {

/// Resolves a driver function. If it is missing, leaves `function` null and sets `all.missing`.
template <class Function>
void find(Driver& all, Function& function, const char* name) {
  if (!all.missing.empty()) return;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t code = ::cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#elif CUDART_VERSION >= 12000
  const cudaError_t code = ::cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#else
  const cudaError_t code = ::cudaGetDriverEntryPoint(name, &found, cudaEnableDefault);
  if (found != nullptr) result = cudaDriverEntryPointSuccess;
#endif
  if (code == cudaErrorInsufficientDriver || code == cudaErrorNoDevice) {
    all.missing = std::string("no usable NVIDIA driver: ") + ::cudaGetErrorString(code);
  } else if (code != cudaSuccess || result != cudaDriverEntryPointSuccess || found == nullptr) {
    all.missing = std::string("the NVIDIA driver has no ") + name + "; update it";
  }
  ::cudaGetLastError();  // clears the error, which is reported above, or the next call would report it
  function = reinterpret_cast<Function>(found);
}

Driver look_up() {
  Driver all;
  int devices = 0;
  const cudaError_t code = ::cudaGetDeviceCount(&devices);
  ::cudaGetLastError();
  if (code != cudaSuccess || devices == 0) {
    all.missing = "no NVIDIA GPU is visible";
    if (code == cudaErrorInsufficientDriver) {
      all.missing = "no NVIDIA driver, or one that is too old for CUDA " + std::to_string(CUDART_VERSION / 1000) + "." +
                    std::to_string(CUDART_VERSION % 1000 / 10);
    } else if (code != cudaSuccess && code != cudaErrorNoDevice) {
      all.missing = std::string("no usable NVIDIA driver: ") + ::cudaGetErrorString(code);
    }
    return all;
  }
  find(all, all.mem_create, "cuMemCreate");
  find(all, all.mem_release, "cuMemRelease");
  find(all, all.mem_map, "cuMemMap");
  find(all, all.mem_unmap, "cuMemUnmap");
  find(all, all.mem_set_access, "cuMemSetAccess");
  find(all, all.mem_address_reserve, "cuMemAddressReserve");
  find(all, all.mem_address_free, "cuMemAddressFree");
  find(all, all.mem_export, "cuMemExportToShareableHandle");
  find(all, all.mem_import, "cuMemImportFromShareableHandle");
  find(all, all.mem_granularity, "cuMemGetAllocationGranularity");
  find(all, all.stream_batch, "cuStreamBatchMemOp");
  find(all, all.device_attribute, "cuDeviceGetAttribute");
  find(all, all.error_string, "cuGetErrorString");
  find(all, all.device_get, "cuDeviceGet");
  find(all, all.retain_context, "cuDevicePrimaryCtxRetain");
  find(all, all.current_context, "cuCtxGetCurrent");
  find(all, all.push_context, "cuCtxPushCurrent");
  find(all, all.pop_context, "cuCtxPopCurrent");
  find(all, all.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  return all;
}

struct Contexts {
  std::mutex mutex;
  std::map<int, CUcontext> by_device;
};
constinit ProcessWide<Contexts> contexts;

/// The primary context, which the CUDA runtime and LibTorch use on a device. Retained until the process ends.
CUcontext primary_context(int device) {
  Contexts& all = *contexts;
  const std::lock_guard lock(all.mutex);
  CUcontext& context = all.by_device[device];
  if (context == nullptr) {
    if (!driver().missing.empty()) throw Unsupported(driver().missing);
    CUdevice handle = 0;
    check(driver().device_get(&handle, device), "cuDeviceGet");
    check(driver().retain_context(&context, handle), "cuDevicePrimaryCtxRetain");
  }
  return context;
}

}  // namespace

const Driver& driver() {
  static const Driver found = look_up();
  return found;
}

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  ::cudaGetLastError();
  throw SystemError(std::string(call) + ": " + ::cudaGetErrorString(code), static_cast<int>(code));
}

void check(CUresult code, const char* call) {
  if (code == CUDA_SUCCESS) return;
  const char* text = nullptr;
  if (driver().error_string != nullptr) driver().error_string(code, &text);
  throw SystemError(std::string(call) + ": " + (text != nullptr ? text : "unknown error of the CUDA driver"),
                    static_cast<int>(code));
}

OnDevice::OnDevice(int device) {
  CUcontext current = nullptr;
  CUcontext context = primary_context(device);
  check(driver().current_context(&current), "cuCtxGetCurrent");
  if (current == context) return;
  check(driver().push_context(context), "cuCtxPushCurrent");
  pushed_ = true;
}

OnDevice::OnDevice(int device, std::nothrow_t) noexcept {
  try {
    CUcontext current = nullptr;
    CUcontext context = primary_context(device);
    if (driver().current_context(&current) != CUDA_SUCCESS || current == context) return;
    pushed_ = driver().push_context(context) == CUDA_SUCCESS;
  } catch (const std::exception&) {
  }
}

OnDevice::~OnDevice() {
  CUcontext popped = nullptr;
  if (pushed_) driver().pop_context(&popped);
}

}  // namespace maniple::cuda_plugin
