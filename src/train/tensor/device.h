// GPU tensors: LibTorch's streams, and how operations run in stream order.
//
// This header hides LibTorch's CUDA interface from the rest of the code. If LibTorch was built without CUDA there are
// no GPU tensors, and the functions here report that.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "train/tensor/staged.h"
#include <maniple/comm/options.h>
#include <maniple/comm/process_group.h>

namespace maniple {

/// The device as the group names it. Throws Unsupported for a device that no backend supports.
Device device_of(const torch::Tensor& tensor, const Argument& argument);

/// LibTorch's current stream on the device in this thread; null for the CPU.
void* current_stream_on(Device device);

/// Calls `start` with options that name the current stream. Staged copies are written back in stream order. The Work is
/// enqueued; tensors are kept alive as long as the operation needs them.
Work run_on_device(ProcessGroup& group, Device device, CallOptions call, std::vector<Staged> tensors,
                   const std::function<Work(const CallOptions&)>& start);

/// For the Work of an isend or irecv: see finishing() in run_operation.h.
Work finish_on_device(const Work& work, Device device, std::vector<Staged> tensors);

/// Throws InvalidArgument if the tensors are on different devices, or on a device that the group does not serve.
Device require_one_device(ProcessGroup& group, const std::vector<Staged>& tensors);

/// A second LibTorch stream for work that overlaps with the current stream; one for each device in use.
class SideStream {
 public:
  SideStream() = default;
  ~SideStream();  ///< joins: the memory it uses may be freed next and reused on the current stream
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  /// Runs `body`. Work that `body` enqueues on the current stream of the device goes to the side stream instead, after
  /// the work already on the current stream.
  void run(Device device, const std::function<void()>& body);
  /// Inside the body of run(): keeps these tensors, which the current stream made and the side stream reads, until the
  /// side stream's work so far is done. The current stream waits for that work two calls later: by then it is usually
  /// done, and few tensors are kept.
  void keep(Device device, std::vector<torch::Tensor> tensors);
  /// Makes later work on this thread's current streams run after everything that run() enqueued; with `only`, on that
  /// device's stream alone.
  void join(std::optional<Device> only = std::nullopt);

 private:
  struct Streams;
  std::shared_ptr<Streams> streams_;
};

/// The group's registered memory on a device if its backend has such memory there, otherwise LibTorch memory.
/// Collective.
RegisteredMemory allocate_for(ProcessGroup& group, std::size_t bytes, Device device);

/// A tensor on such memory, which stays alive as long as the tensor.
torch::Tensor tensor_on(const RegisteredMemory& memory, std::size_t offset, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides, const torch::TensorOptions& options);

/// A copy of a host tensor on the device, through pinned memory: the copy is enqueued on the current stream, and the
/// host does not wait. For a tensor that is not on the host, or a device that is not a GPU: tensor.to(device).
torch::Tensor copy_ahead(const torch::Tensor& tensor, torch::Device device);

/// Copies to a GPU on a separate stream, concurrent with the current stream.
class CopyStream {
 public:
  explicit CopyStream(torch::Device device);  ///< must be a GPU
  /// Replaces the tensors by copies on the device and returns an event. The copies are valid once the current stream
  /// has waited for it.
  std::shared_ptr<void> start(std::vector<torch::Tensor>& tensors);
  /// Makes later work on the current stream wait for the event, so that it may use the tensors of that start().
  void wait(const std::shared_ptr<void>& event, const std::vector<torch::Tensor>& tensors);

 private:
  struct Stream;
  torch::Device device_;
  std::shared_ptr<Stream> stream_;
};

/// Whether the current stream of the device is being captured into a CUDA graph: then the host must not wait for
/// anything.
bool is_capturing(torch::Device device);

/// Peak bytes used by tensors, and peak bytes that LibTorch's allocator reserved, on the GPU with the largest
/// reservation. Zeros if no GPU was used.
struct PeakMemory {
  std::size_t allocated = 0;
  std::size_t reserved = 0;
};
PeakMemory peak_memory();

/// The random generators of all GPUs that this process sees.
std::vector<at::Generator> device_generators();

/// to[i] = from[i], without autograd; on a GPU in a few kernels for all of them, if LibTorch has such kernels.
void copy_all(const std::vector<torch::Tensor>& to, const std::vector<torch::Tensor>& from);

}  // namespace maniple
