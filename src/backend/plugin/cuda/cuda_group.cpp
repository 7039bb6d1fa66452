#include "backend/plugin/cuda/cuda_group.h"

#include <algorithm>
#include <cstring>

#include "backend/plugin/cuda/runtime.h"

namespace maniple::cuda_plugin {
namespace {

constexpr std::size_t kSlotBytes = std::size_t{32} << 20;    // of each rank, up to 8 ranks
constexpr std::size_t kSlotsBytes = std::size_t{256} << 20;  // of all, from 8 ranks on
constexpr std::size_t kAlignment = 256;
// With so many queues and more, flags are in memory of the device, which is nearer: a stream by which to
// set them after an abort will find a queue. With less, they are in memory of the host, which sets them by itself.
constexpr int kEnoughQueues = 16;

std::string numbered(const char* key, int rank) { return key + std::to_string(rank); }

/// Writes a key of this rank and returns those of all ranks.
std::vector<std::string> exchange(const DeviceContext& context, const char* key, const std::string& value) {
  context.store->set(numbered(key, context.rank), value);
  std::vector<std::string> keys;
  for (int rank = 0; rank < context.size(); ++rank) keys.push_back(numbered(key, rank));
  for (;;) {  // in short turns, so that a rank that dies meanwhile ends the wait
    if (context.abort != nullptr && context.abort->aborted()) throw Aborted("the group failed while it was set up");
    try {
      return context.store->multi_get(
          keys, Deadline::sooner(context.deadline, Deadline::after(std::chrono::milliseconds(500))));
    } catch (const Timeout&) {
      if (context.deadline.expired()) throw;
    }
  }
}

/// Why this rank's device cannot be used with those of the others; empty when it can.
std::string obstacle(int device, const std::vector<std::string>& ids) {
  const auto attribute = [device](CUdevice_attribute which) {
    int value = 0;
    return driver().device_attribute(&value, which, device) == CUDA_SUCCESS && value != 0;
  };
  if (!attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) ||
      !attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) {
    return "its GPU cannot share memory by descriptor";
  }
#if CUDART_VERSION >= 12000
  if (!attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)) {
    return "its GPU has no stream memory operations of 64 bits";
  }
#endif
  int visible = 0;
  check(::cudaGetDeviceCount(&visible), "cudaGetDeviceCount");
  for (const std::string& id : ids) {
    int found = -1;
    for (int i = 0; i < visible; ++i) {
      if (device_id(i) == id) found = i;
    }
    if (found < 0) return "it does not see the GPU of another rank (CUDA_VISIBLE_DEVICES)";
    int reachable = 1;
    if (found != device) check(::cudaDeviceCanAccessPeer(&reachable, device, found), "cudaDeviceCanAccessPeer");
    if (reachable == 0) return "its GPU has no peer access to that of another rank";
  }
  return {};
}

/// What other threads do with streams, and captures of theirs into graphs, do not concern calls made while this lives.
class Relaxed {
 public:
  Relaxed() noexcept { ::cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { ::cudaThreadExchangeStreamCaptureMode(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

CudaGroup::CudaGroup(const DeviceContext& context)
    : rank_(context.rank), ranks_(context.size()), device_(context.device), descriptors_(context.descriptors) {
  if (ranks_ > kMostRanks) {
    throw Unsupported("cuda serves groups of up to " + std::to_string(kMostRanks) + " ranks, this one has " +
                      std::to_string(ranks_) + "; use the backend nccl or native");
  }
  for (const int node : context.nodes) {
    if (node != context.nodes.front()) {
      throw Unsupported(
          "cuda serves groups of one host, this one has ranks on several; use the backend nccl or native");
    }
  }
  const OnDevice on(device_);
  const std::vector<std::string> ids = exchange(context, "device/", device_id(device_));
  std::string reason;
  try {
    reason = obstacle(device_, ids);
  } catch (const Error& error) {
    reason = error.what();
  }
  mps_ = true;
  for (const std::string& answer : exchange(context, "mps/", under_mps() ? "yes" : "no"))
    mps_ = mps_ && answer == "yes";
  const bool enough = queue_count() >= kEnoughQueues;
  for (const std::string& answer : exchange(context, "queues/", enough ? "enough" : "few")) {
    if (answer != "enough") host_flags_ = true;
  }
  const std::vector<std::string> reasons = exchange(context, "obstacle/", reason.empty() ? "none" : reason);
  for (int rank = 0; rank < ranks_; ++rank) {
    if (reasons[rank] != "none") {
      throw Unsupported("cuda cannot serve this group, says rank " + std::to_string(context.global_ranks[rank]) + ": " +
                        reasons[rank] + "; use the backend nccl or native");
    }
    if (rank != rank_) peers_ |= std::uint64_t{1} << rank;
    if (ids[rank] != ids.front()) one_device_ = false;
  }
  slot_bytes_ = std::min(kSlotBytes, kSlotsBytes / static_cast<std::size_t>(ranks_)) / kAlignment * kAlignment;
  if (ranks_ == 1) slot_bytes_ = 0;
  const std::vector<std::size_t> sizes(ranks_, kFlagsBytes + slot_bytes_);
  arena_ = std::make_unique<SharedMemory>(*context.descriptors, rank_, device_, sizes, "cuda/arena", context.deadline);
  control_ = std::make_unique<ControlPage>(*context.descriptors, rank_, ranks_, context.deadline);
  load_kernels();
  int least = 0;
  int greatest = 0;
  check(::cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  check(::cudaStreamCreateWithPriority(&release_stream_, cudaStreamNonBlocking, greatest),
        "cudaStreamCreateWithPriority");
  check(::cudaStreamCreateWithPriority(&copy_stream_, cudaStreamNonBlocking, greatest), "cudaStreamCreateWithPriority");
  void* image = nullptr;
  check(::cudaHostAlloc(&image, sizeof(Flags), cudaHostAllocPortable), "cudaHostAlloc");
  release_image_ = static_cast<Flags*>(image);
  check(::cudaEventCreateWithFlags(&last_event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  check(::cudaEventCreateWithFlags(&capture_event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
}

CudaGroup::~CudaGroup() {
  const Relaxed relaxed;
  int before = 0;
  ::cudaGetDevice(&before);
  ::cudaSetDevice(device_);
  // Memory that a kernel still uses must not be unmapped: that would end the process, and under MPS those of others.
  const Deadline limit = Deadline::after(std::chrono::seconds(5));
  while (!is_idle() && !limit.expired()) std::this_thread::yield();
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_all();
  if (releaser_.joinable()) releaser_.join();
  if (!is_idle()) {
    arena_.release();
    control_.release();
    return;
  }
  ::cudaEventDestroy(last_event_);
  ::cudaEventDestroy(capture_event_);
  ::cudaStreamDestroy(release_stream_);
  ::cudaStreamDestroy(copy_stream_);
  ::cudaFreeHost(release_image_);
  ::cudaSetDevice(before);
}

void CudaGroup::enqueue_messages(std::span<const DeviceMessage>, void*) {
  throw Unsupported("cuda sends no messages; they go through memory of the host");
}

RegisteredMemory CudaGroup::allocate(std::span<const std::size_t> sizes, std::uint64_t number, Deadline deadline) {
  if (aborted_) throw Aborted("the group was aborted");
  auto memory =
      std::make_shared<SharedMemory>(*descriptors_, rank_, device_, sizes, "cuda/" + std::to_string(number), deadline);
  std::erase_if(registrations_, [](const Registration& old) { return old.memory.expired(); });
  std::byte* const data = memory->of(rank_);
  registrations_.push_back({number, data, sizes[rank_], memory});
  return RegisteredMemory(data, sizes[rank_], memory);
}

CudaGroup::Located CudaGroup::locate(const void* data, std::size_t bytes) {
  const auto* const start = static_cast<const std::byte*>(data);
  for (const Registration& known : registrations_) {
    if (known.data == nullptr || start < known.data || start + bytes > known.data + known.size) continue;
    if (auto memory = known.memory.lock()) {
      return {std::move(memory), known.number, static_cast<std::size_t>(start - known.data)};
    }
  }
  return {};
}

/// What follows in the stream comes after the last operation of this group, wherever that was enqueued. Among operations of one graph,
/// too; that a graph runs after what was enqueued before it is for the caller to see to.
void CudaGroup::order_after_last(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  check(::cudaStreamGetCaptureInfo(stream, &status, &capture), "cudaStreamGetCaptureInfo");
  capturing_ = status == cudaStreamCaptureStatusActive;
  if (capturing_) {
    if (capture == capture_ && stream != capture_stream_) {
      check(::cudaStreamWaitEvent(stream, capture_event_, 0), "cudaStreamWaitEvent");
    }
    capture_ = capture;
  } else if (any_ && stream != last_stream_) {
    check(::cudaStreamWaitEvent(stream, last_event_, 0), "cudaStreamWaitEvent");
  }
}

void CudaGroup::remember_last(cudaStream_t stream) {
  check(::cudaEventRecord(capturing_ ? capture_event_ : last_event_, stream), "cudaEventRecord");
  (capturing_ ? capture_stream_ : last_stream_) = stream;
  if (!capturing_) any_ = true;
}

bool CudaGroup::is_idle() noexcept {
  if (!any_) return true;
  const cudaError_t code = ::cudaEventQuery(last_event_);
  if (code != cudaSuccess) ::cudaGetLastError();
  return code != cudaErrorNotReady;
}

DeviceFault CudaGroup::fault() noexcept {
  if (aborted_) return {};
  bool found = false;
  const std::uint64_t seq = control_->find_mismatch(found);
  if (found) return {.kind = DeviceFault::Kind::mismatch, .reason = {}, .seq = seq};
  const Relaxed relaxed;
  const cudaError_t code = any_ ? ::cudaEventQuery(last_event_) : cudaSuccess;
  if (code == cudaSuccess || code == cudaErrorNotReady) {
    if (code != cudaSuccess) ::cudaGetLastError();
    return {};
  }
  return {.kind = DeviceFault::Kind::failed, .reason = ::cudaGetErrorString(code), .seq = 0};
}

void CudaGroup::abort() noexcept {
  if (aborted_.exchange(true)) return;
  try {
    releaser_ = std::thread([this] { release(); });
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(1), [this] { return released_; });
  } catch (const std::exception&) {  // no thread: the streams stay blocked, which their owner notices
  }
}

/// Sets all flags that streams of this process wait for, again and again: the streams of ranks that do not lead clear theirs, and what
/// a graph replays later waits anew.
void CudaGroup::release() {
  const Relaxed relaxed;
  if (::cudaSetDevice(device_) != cudaSuccess) return;
  Flags& image = *release_image_;
  std::memset(&image, 0, sizeof image);
  for (int rank = 0; rank < ranks_; ++rank) {
    image.ready[rank] = image.done[rank] = static_cast<std::uint8_t>(peers_ >> rank & 1);
    image.lead_ready[rank] = 1;
  }
  image.lead_done = 1;
  image.stop = 1;
  std::unique_lock lock(mutex_);
  while (!leaving_) {
    lock.unlock();
    if (host_flags_) {
      // Several times before CUDA is asked: its calls may wait for a thread that is enqueueing into a full stream.
      for (int turn = 0; turn < 20 && !leaving_; ++turn) {
        Flags* const own = control_->flags(rank_);
        __atomic_store_n(&own->stop, 1u,
                         __ATOMIC_SEQ_CST);  // before all else: kernels that start now are to do nothing
        std::memcpy(own, &image, sizeof image);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        std::this_thread::yield();
      }
    } else {
      set_flags_on_device(image);
    }
    const bool idle = is_idle();
    lock.lock();
    if (idle && !released_) {
      released_ = true;
      changed_.notify_all();
    }
    changed_.wait_for(lock, idle ? std::chrono::microseconds(20000) : std::chrono::microseconds(200),
                      [this] { return leaving_.load(); });
  }
}

/// In two ways, by the queues of kernels and by those of copies, whichever is free.
void CudaGroup::set_flags_on_device(const Flags& image) {
  Flags* const own = flags(rank_);
  std::vector<CUstreamBatchMemOpParams> writes;
  const auto write = [&](const void* of_image, bool wide) {
    const std::size_t offset = static_cast<const std::byte*>(of_image) - reinterpret_cast<const std::byte*>(&image);
    CUstreamBatchMemOpParams one = {};
    one.writeValue.operation = wide ? CU_STREAM_MEM_OP_WRITE_VALUE_64 : CU_STREAM_MEM_OP_WRITE_VALUE_32;
    one.writeValue.address = reinterpret_cast<CUdeviceptr>(own) + offset;
    std::memcpy(wide ? static_cast<void*>(&one.writeValue.value64) : &one.writeValue.value, of_image, wide ? 8 : 4);
    writes.push_back(one);
  };
  write(&image.stop, false);
  for (int base = 0; base < ranks_; base += 8) {
    write(&image.ready[base], true);
    write(&image.done[base], true);
  }
  for (int rank = 0; rank < ranks_; ++rank) write(&image.lead_ready[rank], true);
  write(&image.lead_done, true);
  const auto is_free = [](cudaStream_t stream) { return ::cudaStreamQuery(stream) != cudaErrorNotReady; };
  if (is_free(release_stream_)) {
    driver().stream_batch(release_stream_, static_cast<unsigned>(writes.size()), writes.data(), 0);
  }
  if (is_free(copy_stream_)) {
    ::cudaMemcpyAsync(&own->stop, &image.stop, sizeof image.stop, cudaMemcpyHostToDevice, copy_stream_);
    ::cudaMemcpyAsync(own, &image, sizeof image, cudaMemcpyHostToDevice, copy_stream_);
  }
  ::cudaGetLastError();
}

}  // namespace maniple::cuda_plugin
