#include "train/tensor/device.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <map>

#include <torch/torch.h>

#ifdef MANIPLE_TORCH_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/Sleep.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "comm/backend/work_state.h"
#include "comm/base/check.h"
#include "comm/base/log.h"
#include "comm/group/tensor_calls.h"
#include "train/tensor/public_call.h"
#include "train/tensor/torch_compat.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

void write_back_all(const std::vector<Staged>& tensors) {
  for (const Staged& tensor : tensors) tensor.write_back();
}

#ifdef MANIPLE_TORCH_CUDA
// Makes Work::wait order this thread's current stream after an operation.
const bool kHookIsSet = [] {
  current_stream.store([](int device) -> void* {
    return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
  });
  return true;
}();

c10::DeviceIndex index_of(Device device) { return static_cast<c10::DeviceIndex>(device.index); }
#endif

}  // namespace

Device device_of(const torch::Tensor& tensor, const Argument& argument) {
  if (tensor.device().is_cpu()) return {};
#ifdef MANIPLE_TORCH_CUDA
  if (tensor.device().is_cuda()) return Device::cuda(tensor.device().index());
#endif
  throw Unsupported(format_text(
      "{} is a tensor of {} on {}; this build communicates tensors of the CPU{}; pass tensor.cpu()", named(argument),
      c10::toString(tensor.scalar_type()), tensor.device().str(),
#ifdef MANIPLE_TORCH_CUDA
      " and of NVIDIA GPUs"
#else
      " only"
#endif
      ));
}

Device require_one_device(ProcessGroup& group, const std::vector<Staged>& tensors) {
  const Staged* first = nullptr;
  for (const Staged& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (first == nullptr) first = &tensor;
    MANIPLE_REQUIRE(tensor.buffer().device == first->buffer().device,
                    "{} is on {}, but {} is on {}; all tensors of a call must be on one device", tensor.name(),
                    to_string(tensor.buffer().device), first->name(), to_string(first->buffer().device));
  }
  if (first == nullptr) return {};
  MANIPLE_REQUIRE(
      !first->buffer().device.is_cpu() || serves_host_tensors(group),
      "{} is on the CPU, and backend {} communicates tensors of GPUs; pass tensor.cuda(), or make the group with "
      "backend \"cpu:native,cuda:{}\"",
      first->name(), group.backend(), group.backend());
  return first->buffer().device;
}

#ifdef MANIPLE_TORCH_CUDA

void* current_stream_on(Device device) {
  return device.is_cpu() ? nullptr : c10::cuda::getCurrentCUDAStream(index_of(device)).stream();
}

Work run_on_device(ProcessGroup& group, Device device, CallOptions call, std::vector<Staged> tensors,
                   const std::function<Work(const CallOptions&)>& start) {
  const bool copies = std::any_of(tensors.begin(), tensors.end(), [](const Staged& one) { return one.writes_back(); });
  const bool async = call.async_op;
  c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(index_of(device));
  if (!copies) {
    call.stream = stream.stream();
    Work work = start(call);
    // On the current stream LibTorch's allocator preserves the order; on our stream the tensors must live until the
    // end.
    if (async) when_done(work, [tensors = std::move(tensors)](const std::exception_ptr&) {});
    return work;
  }
  // Writing back belongs to the operation: both run on one stream, and the Work ends when that stream gets there.
  if (async) {
    at::cuda::CUDAEvent event;
    event.record(stream);
    stream = c10::cuda::getStreamFromPool(true, index_of(device));
    event.block(stream);
  }
  const c10::cuda::CUDAStreamGuard guard(stream);
  call.stream = stream.stream();
  call.async_op = false;
  (void)start(call);
  write_back_all(tensors);
  return mark(group, device, call.stream, std::make_shared<std::vector<Staged>>(std::move(tensors)));
}

Work finish_on_device(const Work& work, Device device, std::vector<Staged> tensors) {
  const bool copies = std::any_of(tensors.begin(), tensors.end(), [](const Staged& one) { return one.writes_back(); });
  if (!copies) {
    when_done(work, [tensors = std::move(tensors)](const std::exception_ptr&) {});
    return work;
  }
  return work.then([tensors = std::move(tensors), device] {
    const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(true, index_of(device));
    const c10::cuda::CUDAStreamGuard guard(stream);
    write_back_all(tensors);
    stream.synchronize();
  });
}

struct SideStream::Streams {
  struct One {
    c10::cuda::CUDAStream stream;
    at::cuda::CUDAEvent forked{cudaEventDisableTiming};
    at::cuda::CUDAEvent joined{cudaEventDisableTiming};
    bool busy = false;
    struct Kept {
      at::cuda::CUDAEvent read{cudaEventDisableTiming};
      std::vector<torch::Tensor> tensors;
    };
    std::deque<Kept> kept = {};
    std::vector<at::cuda::CUDAEvent> spare = {};
  };
  std::map<int, One> by_device;
};

// Chooses a stream by measurement. While a stream waits for an event of the current one (which a side stream does for
// most of a step), each kernel of the current stream may start 1 us later. This happens if the GPU fetches the commands
// of both streams through one channel, which no API reports. It costs 3 % of a step of ResNet-50 on an H200. So several
// streams are tried: each trial times consecutive kernels while the stream waits for their end, and compares with the
// time without a waiting stream.
static c10::cuda::CUDAStream stream_beside(Device device) try {
  constexpr int kStreams = 6, kTries = 3, kKernels = 200;
  constexpr std::int64_t kCycles = 3'000'000;  // 2 ms
  constexpr float kAlike = 1.1F;
  const c10::cuda::CUDAGuard guard(index_of(device));  // `sleep` runs on the current device
  const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(index_of(device));
  const auto next = [&] {  // the pool is cyclic and may return the current stream
    const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(true, index_of(device));
    return stream == current ? c10::cuda::getStreamFromPool(true, index_of(device)) : stream;
  };
  if (is_capturing(torch::Device(torch::kCUDA, index_of(device)))) return next();
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);  // other threads may be capturing
  const auto options = torch::TensorOptions().device(torch::kCUDA, index_of(device));
  torch::Tensor number = torch::zeros({1}, options);
  const auto milliseconds = [&](const c10::cuda::CUDAStream* waits) {
    float least = std::numeric_limits<float>::max();
    for (int i = 0; i < kTries; ++i) {
      at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
      at::cuda::sleep(kCycles);  // sleep: on the GPU, so that its kernels do not wait for the host
      begin.record(current);
      for (int k = 0; k < kKernels; ++k) number.add_(1);
      end.record(current);
      if (waits != nullptr) end.block(*waits);
      current.synchronize();
      least = std::min(least, begin.elapsed_time(end));
    }
    return least;
  };
  const float alone = milliseconds(nullptr);
  c10::cuda::CUDAStream best = next();
  float least = milliseconds(&best);
  for (int i = 1; i < kStreams && least > alone * kAlike; ++i) {
    const c10::cuda::CUDAStream stream = next();
    const float beside = milliseconds(&stream);
    if (beside >= least) continue;
    least = beside;
    best = stream;
  }
  log_debug("cuda:{}: {} kernels in a row take {} ms, {} ms alongside the stream of gradients", device.index, kKernels,
            alone, least);
  return best;
} catch (
    const c10::Error& error) {  // training goes on without it; if the device has failed, the next call reports that
  log_debug("cuda:{}: no streams are compared: {}", device.index, error.what_without_backtrace());
  return c10::cuda::getStreamFromPool(true, index_of(device));
}

void SideStream::run(Device device, const std::function<void()>& body) {
  if (!streams_) streams_ = std::make_shared<Streams>();
  auto it = streams_->by_device.find(device.index);
  if (it == streams_->by_device.end()) {
    it = streams_->by_device.emplace(device.index, Streams::One{stream_beside(device)}).first;
  }
  Streams::One& one = it->second;
  if (one.kept.size() >= 2) {
    Streams::One::Kept& oldest = one.kept.front();
    oldest.read.block(c10::cuda::getCurrentCUDAStream(index_of(device)));
    one.spare.push_back(std::move(oldest.read));
    one.kept.pop_front();
  }
  one.forked.record(c10::cuda::getCurrentCUDAStream(index_of(device)));
  one.forked.block(one.stream);
  const c10::cuda::CUDAStreamGuard guard(one.stream);
  one.busy = true;
  body();
}

void SideStream::keep(Device device, std::vector<torch::Tensor> tensors) {
  Streams::One& one = streams_->by_device.at(device.index);
  Streams::One::Kept kept;
  if (!one.spare.empty()) {
    kept.read = std::move(one.spare.back());
    one.spare.pop_back();
  }
  kept.read.record(one.stream);
  kept.tensors = std::move(tensors);
  one.kept.push_back(std::move(kept));
}

void SideStream::join(std::optional<Device> only) {
  if (!streams_) return;
  for (auto& [index, one] : streams_->by_device) {
    if (!one.busy || (only && only->index != index)) continue;
    one.joined.record(one.stream);
    one.joined.block(c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(index)));
    one.busy = false;
    for (auto& kept : one.kept) one.spare.push_back(std::move(kept.read));
    one.kept.clear();
  }
}

SideStream::~SideStream() {
  try {
    join();
  } catch (...) {  // the device has failed: nothing more is computed on it
  }
}

struct CopyStream::Stream {
  c10::cuda::CUDAStream stream;
};

CopyStream::CopyStream(torch::Device device)
    : device_(device), stream_(std::make_shared<Stream>(Stream{c10::cuda::getStreamFromPool(false, device.index())})) {}

std::shared_ptr<void> CopyStream::start(std::vector<torch::Tensor>& tensors) {
  const c10::cuda::CUDAStreamGuard guard(stream_->stream);
  for (torch::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.is_cpu()) tensor = copy_ahead(tensor, device_);
  }
  auto event = std::make_shared<at::cuda::CUDAEvent>(cudaEventDisableTiming);
  event->record(stream_->stream);
  return event;
}

void CopyStream::wait(const std::shared_ptr<void>& event, const std::vector<torch::Tensor>& tensors) {
  const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(device_.index());
  static_cast<at::cuda::CUDAEvent*>(event.get())->block(current);
  // The tensors were allocated on the copy stream; without record_stream, their memory could be reused for the next
  // copy too early.
  for (const torch::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.is_cuda() && tensor.layout() == torch::kStrided) tensor.record_stream(current);
  }
}

bool is_capturing(torch::Device device) {
  if (!device.is_cuda()) return false;
  const c10::cuda::CUDAGuard guard(device);
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

PeakMemory peak_memory() {
  PeakMemory most;
  const c10::DeviceIndex count = c10::cuda::device_count();
  for (c10::DeviceIndex i = 0; i < count; ++i) {
    if (!at::detail::getCUDAHooks().hasPrimaryContext(i)) continue;  // must not be the first user of a GPU
    try {
      const auto statistics = c10::cuda::CUDACachingAllocator::getDeviceStats(i);
      // Index 0 of the counters covers all pools together.
      const std::size_t reserved = statistics.reserved_bytes[0].peak;
      if (reserved > most.reserved) most = {static_cast<std::size_t>(statistics.allocated_bytes[0].peak), reserved};
    } catch (const c10::Error&) {
      // Other libraries use this GPU in this process, but LibTorch does not yet.
    }
  }
  return most;
}

std::vector<at::Generator> device_generators() {
  std::vector<at::Generator> generators;
  const c10::DeviceIndex count = c10::cuda::device_count();
  for (c10::DeviceIndex i = 0; i < count; ++i) {
    generators.push_back(at::globalContext().defaultGenerator(torch::Device(torch::kCUDA, i)));
  }
  return generators;
}

#else

struct CopyStream::Stream {};
CopyStream::CopyStream(torch::Device device) : device_(device) {}
std::shared_ptr<void> CopyStream::start(std::vector<torch::Tensor>& tensors) {
  for (torch::Tensor& tensor : tensors) tensor = tensor.defined() ? tensor.to(device_) : tensor;
  return nullptr;
}
void CopyStream::wait(const std::shared_ptr<void>&, const std::vector<torch::Tensor>&) {}
bool is_capturing(torch::Device) { return false; }
PeakMemory peak_memory() { return {}; }
std::vector<at::Generator> device_generators() { return {}; }

struct SideStream::Streams {};
void SideStream::run(Device, const std::function<void()>& body) { body(); }
void SideStream::keep(Device, std::vector<torch::Tensor>) {}
void SideStream::join(std::optional<Device>) {}
SideStream::~SideStream() = default;

// Never called: there are no GPU tensors.
void* current_stream_on(Device) { return nullptr; }
Work run_on_device(ProcessGroup&, Device, CallOptions call, std::vector<Staged>,
                   const std::function<Work(const CallOptions&)>& start) {
  return start(call);
}
Work finish_on_device(const Work& work, Device, std::vector<Staged> tensors) {
  return work.then([tensors = std::move(tensors)] { write_back_all(tensors); });
}

#endif

RegisteredMemory allocate_for(ProcessGroup& group, std::size_t bytes, Device device) {
  if (device.is_cpu()) return group.allocate(bytes, {}, public_place());
  if (device_of(group)) return group.allocate(bytes, device, {}, public_place());
  const auto options =
      torch::TensorOptions().dtype(torch::kUInt8).device(torch::kCUDA, static_cast<c10::DeviceIndex>(device.index));
  const auto memory = std::make_shared<torch::Tensor>(torch::zeros({static_cast<std::int64_t>(bytes)}, options));
  return {memory->data_ptr(), bytes, memory};
}

torch::Tensor copy_ahead(const torch::Tensor& tensor, torch::Device device) {
  if (!device.is_cuda() || !tensor.is_cpu() || tensor.layout() != torch::kStrided || tensor.numel() == 0) {
    return tensor.to(device);
  }
  const torch::Tensor dense = is_dense(tensor) ? tensor : tensor.contiguous();
  const torch::Tensor pinned = dense.is_pinned() ? dense : dense.pin_memory();
  return pinned.to(dense.options().device(device), /*non_blocking=*/true);
}

torch::Tensor tensor_on(const RegisteredMemory& memory, std::size_t offset, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides, const torch::TensorOptions& options) {
  void* data = static_cast<std::byte*>(memory.data()) + offset;
  return torch::from_blob(data, sizes, strides, [memory](void*) {}, options.requires_grad(false));
}

#if MANIPLE_TORCH_AT_LEAST(2, 2)
namespace {

/// Whether both tensors store their elements in the same order. Strides of dimensions of size 1 are irrelevant: they
/// often differ between a convolution's weight and its gradient.
bool same_order(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.sizes() != b.sizes() || a.dtype() != b.dtype()) return false;
  for (std::int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) != 1 && a.stride(i) != b.stride(i)) return false;
  }
  return true;
}

/// LibTorch's kernel for many tensors requires equal strides and one dtype; if a single tensor differs, LibTorch copies
/// all of them one by one. That kernel also keeps too few bytes in flight to use the full memory bandwidth, so large
/// tensors are copied separately, by CUDA's own copy.
void copy_all_on_device(const std::vector<torch::Tensor>& to, const std::vector<torch::Tensor>& from) {
  constexpr std::size_t kLarge = std::size_t{1} << 20;
  struct Lists {
    std::vector<torch::Tensor> targets, sources;
  };
  std::map<torch::ScalarType, Lists> by_dtype;
  for (std::size_t i = 0; i < to.size(); ++i) {
    if (to[i].nbytes() >= kLarge || !same_order(to[i], from[i])) {
      to[i].copy_(from[i]);
      continue;
    }
    Lists& lists = by_dtype[to[i].scalar_type()];
    lists.targets.push_back(to[i]);
    const bool equal = to[i].strides() == from[i].strides();
    lists.sources.push_back(equal ? from[i] : from[i].as_strided(to[i].sizes(), to[i].strides()));
  }
  for (const auto& [dtype, lists] : by_dtype) at::_foreach_copy_(lists.targets, lists.sources);
}

}  // namespace
#endif

void copy_all(const std::vector<torch::Tensor>& to, const std::vector<torch::Tensor>& from) {
  const bool on_cpu = to.empty() || to.front().is_cpu();
#if MANIPLE_TORCH_AT_LEAST(2, 2)
  if (!on_cpu) return copy_all_on_device(to, from);
#endif
  for (std::size_t i = 0; i < to.size(); ++i) {
    // Most tensors are so small that a tensor operation would take longer than the copy.
    if (on_cpu && is_dense(to[i]) && to[i].strides() == from[i].strides() && to[i].dtype() == from[i].dtype()) {
      std::memcpy(to[i].data_ptr(), from[i].data_ptr(), to[i].nbytes());
    } else {
      to[i].copy_(from[i]);
    }
  }
}

}  // namespace maniple
