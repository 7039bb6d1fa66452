#include "plugins/cuda/shared_memory.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "plugins/cuda/driver.h"

namespace maniple::cuda_plugin {
namespace {

/// Closes its descriptor on destruction.
struct Descriptor {
  int number = -1;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

/// Keeps an allocation alive until it is mapped; after that the mapping keeps it alive.
struct Handle {
  CUmemGenericAllocationHandle value = 0;
  bool held = false;
  ~Handle() {
    if (held) driver().mem_release(value);
  }
};

/// Uses a new stream, because other streams may be waiting for ranks that wait for this one.
void zero(std::byte* memory, std::size_t bytes) {
  cudaStream_t stream = nullptr;
  check(::cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  cudaError_t code = ::cudaMemsetAsync(memory, 0, bytes, stream);
  if (code == cudaSuccess) code = ::cudaStreamSynchronize(stream);
  ::cudaStreamDestroy(stream);
  check(code, "cudaMemsetAsync");
}

}  // namespace

SharedMemory::SharedMemory(DescriptorExchange& descriptors, int rank, int device, std::span<const std::size_t> sizes,
                           const std::string& topic, Deadline deadline, std::shared_ptr<const std::atomic<bool>> in_use)
    : device_(device), in_use_(std::move(in_use)), mapped_(sizes.size()) {
  const OnDevice on(device);
  check(::cudaFree(nullptr), "cudaFree");  // creates the context on first use
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  std::size_t unit = 0;
  check(driver().mem_granularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
  CUmemAccessDesc access = {};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const auto rounded = [unit](std::size_t bytes) { return (bytes + unit - 1) / unit * unit; };
  apart_ = rounded(*std::max_element(sizes.begin(), sizes.end()));
  if (apart_ == 0) return;
  CUdeviceptr first = 0;
  check(driver().mem_address_reserve(&first, sizes.size() * apart_, 0, 0, 0), "cuMemAddressReserve");
  first_ = reinterpret_cast<std::byte*>(first);
  try {
    for (int maker = 0; maker < static_cast<int>(sizes.size()); ++maker) {
      if (sizes[maker] == 0) continue;
      const std::size_t mapped = rounded(sizes[maker]);
      Handle handle;
      Descriptor descriptor;
      if (maker == rank) {
        check(driver().mem_create(&handle.value, mapped, &properties, 0), "cuMemCreate");
        handle.held = true;
        check(driver().mem_export(&descriptor.number, handle.value, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
              "cuMemExportToShareableHandle");
      } else {
        descriptor.number = descriptors.share(topic + "/" + std::to_string(maker), maker, -1, deadline);
        check(driver().mem_import(&handle.value, reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor.number)),
                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
              "cuMemImportFromShareableHandle");
        handle.held = true;
      }
      const CUdeviceptr address = first + maker * apart_;
      check(driver().mem_map(address, mapped, 0, handle.value, 0), "cuMemMap");
      mapped_[maker] = mapped;
      check(driver().mem_set_access(address, mapped, &access, 1), "cuMemSetAccess");
      if (maker == rank) {
        zero(of(maker), mapped);  // before another rank can access it
        descriptors.share(topic + "/" + std::to_string(maker), maker, descriptor.number, deadline);
      }
    }
  } catch (...) {
    unmap();
    throw;
  }
}

// Enqueued work may still use the memory on streams unknown to this class, and unmapping does not wait for it. So, like
// cudaFree, this waits for the whole device. That is not allowed while a graph is captured: the memory then stays
// mapped and the capture fails. Registered memory must not be freed during a capture.
SharedMemory::~SharedMemory() {
  if (in_use_ && *in_use_) return;
  const OnDevice on(device_, std::nothrow);
  if (::cudaDeviceSynchronize() == cudaErrorStreamCaptureUnsupported) {
    ::cudaGetLastError();
  } else {
    unmap();
  }
}

void SharedMemory::unmap() noexcept {
  const OnDevice on(device_, std::nothrow);
  const auto first = reinterpret_cast<CUdeviceptr>(first_);
  for (std::size_t rank = 0; rank < mapped_.size(); ++rank) {
    if (mapped_[rank] != 0) driver().mem_unmap(first + rank * apart_, mapped_[rank]);
  }
  if (first_ != nullptr) driver().mem_address_free(first, mapped_.size() * apart_);
}

}  // namespace maniple::cuda_plugin
