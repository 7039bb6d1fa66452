#include "backend/plugin/cuda/driver.h"

#include <maniple/comm/error.h>

namespace maniple::cuda_plugin {
namespace {

/// Leaves `function` null and says what is missing when the driver has no such function.
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
  ::cudaGetLastError();  // what failed here is said above, not by the next call
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
  return all;
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
  check(::cudaGetDevice(&before_), "cudaGetDevice");
  if (device != before_) check(::cudaSetDevice(device), "cudaSetDevice");
}

OnDevice::~OnDevice() {
  int now = 0;
  if (::cudaGetDevice(&now) == cudaSuccess && now != before_) ::cudaSetDevice(before_);
}

}  // namespace maniple::cuda_plugin
