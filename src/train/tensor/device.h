// Tensors on a GPU: LibTorch's streams, and how an operation runs in their order.
//
// This is the only header of ours behind which LibTorch's CUDA is seen. With a LibTorch that has none there are no such
// tensors, and the functions here say so.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "train/tensor/staged.h"
#include <maniple/comm/options.h>
#include <maniple/comm/process_group.h>

namespace maniple {

/// As the group sees it. Throws Unsupported for a device that no backend knows.
Device device_of(const torch::Tensor& tensor, const Argument& argument);

/// LibTorch's current stream on the device in this thread; null for the CPU.
void* current_stream_on(Device device);

/// Calls `start` with options that name the current stream. Copies that were made of the tensors are written back in
/// its order. The Work is enqueued; tensors are kept alive for as long as the operation needs them.
Work run_on_device(ProcessGroup& group, Device device, CallOptions call, std::vector<Staged> tensors,
                   const std::function<Work(const CallOptions&)>& start);

/// For a Work of isend or irecv: as `finishing` of run_operation.h.
Work finish_on_device(const Work& work, Device device, std::vector<Staged> tensors);

/// Throws InvalidArgument when the tensors are on different devices, or on one that the group does not serve.
Device require_one_device(ProcessGroup& group, const std::vector<Staged>& tensors);

/// A stream of LibTorch's beside the current one, for work that overlaps with what the current one does: one for each
/// device that is used.
class SideStream {
 public:
  SideStream() = default;
  ~SideStream();  ///< join(): memory that it uses may be freed next, and be given to what the current stream does
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  /// Runs `body`; what it enqueues on the current stream of the device goes to the side stream, after what the current
  /// one holds.
  void run(Device device, const std::function<void()>& body);
  /// In the body of `run`: these tensors, which the current stream made and the side stream reads, stay until what it
  /// has been given so far is done. The current stream waits for that two calls later: by then it is most often over,
  /// and few tensors are kept.
  void keep(Device device, std::vector<torch::Tensor> tensors);
  /// What is enqueued on the current streams of this thread from now on comes after all that `run` has enqueued; on
  /// those of one device, if that is given.
  void join(std::optional<Device> only = std::nullopt);

 private:
  struct Streams;
  std::shared_ptr<Streams> streams_;
};

/// Registered memory of the group on a device where its backend has such memory, otherwise memory of LibTorch's.
/// Collective.
RegisteredMemory allocate_for(ProcessGroup& group, std::size_t bytes, Device device);

/// A tensor on such memory, which lives as long as the tensor does.
torch::Tensor tensor_on(const RegisteredMemory& memory, std::size_t offset, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides, const torch::TensorOptions& options);

/// A copy on the device of a tensor of the host, through pinned memory: it is enqueued on the current stream, and the
/// host does not wait. A tensor that is not on the host, or a device that is no GPU: as tensor.to(device).
torch::Tensor copy_ahead(const torch::Tensor& tensor, torch::Device device);

/// Copies to a GPU on a stream of their own, beside what the current one does.
class CopyStream {
 public:
  explicit CopyStream(torch::Device device);  ///< a GPU
  /// The tensors on the device, and an event: they hold their values once the current stream has waited for it.
  std::shared_ptr<void> start(std::vector<torch::Tensor>& tensors);
  /// What is enqueued on the current stream from now on may use the tensors of a start().
  void wait(const std::shared_ptr<void>& event, const std::vector<torch::Tensor>& tensors);

 private:
  struct Stream;
  torch::Device device_;
  std::shared_ptr<Stream> stream_;
};

/// Whether the current stream of the device is being captured into a CUDA graph: then nothing may be waited for.
bool is_capturing(torch::Device device);

/// The most that tensors have taken of a GPU, and that LibTorch's allocator has taken for them, in bytes: of the GPU of
/// which it has taken the most. Zeros where no GPU was used.
struct PeakMemory {
  std::size_t allocated = 0;
  std::size_t reserved = 0;
};
PeakMemory peak_memory();

/// The generators of random numbers of all GPUs that this process sees.
std::vector<at::Generator> device_generators();

/// to[i] = from[i], without autograd; on a GPU in a few kernels for all of them, where LibTorch has such.
void copy_all(const std::vector<torch::Tensor>& to, const std::vector<torch::Tensor>& from);

}  // namespace maniple
