// The CUDA driver functions that the plugin calls, resolved at run time, and the translation of CUDA errors.
//
// The plugin is not linked with the driver, so that it loads on machines without one and can report that.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <new>
#include <string>

namespace maniple::cuda_plugin {

struct Driver {
  decltype(&::cuMemCreate) mem_create = nullptr;
  decltype(&::cuMemRelease) mem_release = nullptr;
  decltype(&::cuMemMap) mem_map = nullptr;
  decltype(&::cuMemUnmap) mem_unmap = nullptr;
  decltype(&::cuMemSetAccess) mem_set_access = nullptr;
  decltype(&::cuMemAddressReserve) mem_address_reserve = nullptr;
  decltype(&::cuMemAddressFree) mem_address_free = nullptr;
  decltype(&::cuMemExportToShareableHandle) mem_export = nullptr;
  decltype(&::cuMemImportFromShareableHandle) mem_import = nullptr;
  decltype(&::cuMemGetAllocationGranularity) mem_granularity = nullptr;
  decltype(&::cuStreamBatchMemOp) stream_batch = nullptr;
  decltype(&::cuDeviceGetAttribute) device_attribute = nullptr;
  decltype(&::cuGetErrorString) error_string = nullptr;
  decltype(&::cuDeviceGet) device_get = nullptr;
  decltype(&::cuDevicePrimaryCtxRetain) retain_context = nullptr;
  decltype(&::cuCtxGetCurrent) current_context = nullptr;
  decltype(&::cuCtxPushCurrent) push_context = nullptr;
  decltype(&::cuCtxPopCurrent) pop_context = nullptr;
  decltype(&::cuThreadExchangeStreamCaptureMode) exchange_capture_mode = nullptr;
  std::string missing;  ///< why the driver cannot be used; empty if it can
};

/// Resolved by the first call.
const Driver& driver();

/// Throw SystemError with CUDA's text: "cudaMalloc: out of memory".
void check(cudaError_t code, const char* call);
void check(CUresult code, const char* call);

/// Makes a device current in this thread until destroyed, by pushing its primary context. cudaSetDevice would not do:
/// since CUDA 12, restoring the previous device creates a context there if it has none, 500 MiB on GPU 0 for each rank.
class OnDevice {
 public:
  explicit OnDevice(int device);
  /// For destructors: if the device cannot be made current, the following CUDA calls fail.
  OnDevice(int device, std::nothrow_t) noexcept;
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  bool pushed_ = false;
};

/// Until destroyed, allows this thread to make CUDA calls without a stream while another thread captures a graph. (In
/// CUDA's global capture mode they would fail and break the capture.) Only for calls that do not harm a capture.
class Relaxed {
 public:
  Relaxed() noexcept { exchange(); }
  ~Relaxed() { exchange(); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  /// Uses the driver's function, because the runtime's creates a context on the thread's current device.
  void exchange() noexcept {
    if (driver().exchange_capture_mode != nullptr) driver().exchange_capture_mode(&mode_);
  }
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace maniple::cuda_plugin
