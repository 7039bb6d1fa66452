// The functions of the CUDA driver that the plugin calls, found at run time, and how errors of CUDA become ours.
//
// The library is linked with no driver, so that it loads where there is none and can say so.
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
  std::string missing;  ///< why it cannot be used; empty when it can
};

/// Looked up when first called.
const Driver& driver();

/// Throw SystemError with the text of CUDA: "cudaMalloc: out of memory".
void check(cudaError_t code, const char* call);
void check(CUresult code, const char* call);

/// While this lives, a device is the current one of this thread: its primary context is pushed, and popped at the end.
/// cudaSetDevice would not do: from CUDA 12 on, setting the previous device again creates a context there if it has
/// none, 500 MiB on GPU 0 for each rank.
class OnDevice {
 public:
  explicit OnDevice(int device);
  /// For destructors: where the device cannot be made current, CUDA itself fails the calls that follow.
  OnDevice(int device, std::nothrow_t) noexcept;
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  bool pushed_ = false;
};

/// While this lives, calls of this thread that are not made on a stream may be made while another thread captures a
/// graph (in the mode that CUDA calls global they would fail, and break the capture). For those that do not harm it.
class Relaxed {
 public:
  Relaxed() noexcept { exchange(); }
  ~Relaxed() { exchange(); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  /// By the driver: the runtime's function creates a context on the thread's current device.
  void exchange() noexcept {
    if (driver().exchange_capture_mode != nullptr) driver().exchange_capture_mode(&mode_);
  }
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace maniple::cuda_plugin
