// The functions of the CUDA driver that the plugin calls, found at run time, and how errors of CUDA become ours.
//
// The library is linked with no driver, so that it loads where there is none and can say so.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

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
  std::string missing;  ///< why it cannot be used; empty when it can
};

/// Looked up when first called.
const Driver& driver();

/// Throw SystemError with the text of CUDA: "cudaMalloc: out of memory".
void check(cudaError_t code, const char* call);
void check(CUresult code, const char* call);

/// Makes a device the current one of this thread, and the one before it again at the end.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

/// While this lives, calls of this thread that are not made on a stream may be made while another thread captures a graph (in the mode
/// that CUDA calls global they would fail, and break the capture). For those that do not harm it.
class Relaxed {
 public:
  Relaxed() noexcept { ::cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { ::cudaThreadExchangeStreamCaptureMode(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace maniple::cuda_plugin
